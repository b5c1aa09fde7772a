"""Each setting with each method that does not read it is refused, whichever door it comes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from card import LLM, AsyncLLM
from card.assembly.plan import Facts, Plan, resolve
from card.config import DraftSettings, EngineSettings
from card.config.fields import Setting, declared
from card.config.registry import methods, own_settings
from card.config.splitting import engine_settings
from card.errors import SettingsError
from card.inside.adapters.settings import AdapterSettings
from tests.commands import run_command
from tests.crosses.given import other_value, typed

SETTINGS: Mapping[str, Setting] = {**engine_settings(), **declared(DraftSettings)}
OWNER: dict[str, type[Any]] = {name: kind for kind in (EngineSettings, DraftSettings) for name in declared(kind)}
READ_BY_SOME = sorted(name for name, one in SETTINGS.items() if one.readers)
NOTHING = "would do nothing: it is for "


def other(name: str) -> Any:
    return other_value({**OWNER, **own_settings()}[name], name)


def planned(method: str, **settings: Any) -> Plan:
    drafts = methods()[method].needs_draft and "draft_address" not in settings
    return resolve({"draft": "a" if drafts else None, **settings}, Facts(has_draft=drafts), method=method)


def reading(plan: Plan) -> set[str]:
    """Return what reads settings in an engine, from what its plan says it will do."""
    there = {f"method {plan.method.name}", f"growth {plan.draft.growth}", *(f"writer {name}" for name in plan.writers)}
    there |= {"candidates"} if plan.placements or plan.writers or plan.self_drafting else set()
    return there | ({"drafting with a model", "drafting with a model here"} if plan.placements else set())


def unread_by(method: str) -> list[str]:
    there = reading(planned(method))
    return [name for name in READ_BY_SOME if there.isdisjoint(SETTINGS[name].readers)]


UNREAD = [(method, name) for method in methods() for name in unread_by(method)]
# A pairwise cover: each method and each setting in one pair at least, the same ones each time.
COVER = list(dict.fromkeys([*{one[0]: one for one in UNREAD}.values(), *{one[1]: one for one in UNREAD}.values()]))


@pytest.mark.parametrize("method", methods())
def test_a_method_takes_what_it_reads_and_refuses_what_it_does_not(method: str) -> None:
    unread = set(unread_by(method))
    for name in READ_BY_SOME:
        try:
            planned(method, **{name: other(name)})
        except SettingsError as error:
            assert (f"{name} {NOTHING}" in str(error)) == (name in unread), error
        else:
            assert name not in unread, f"{method} takes {name}, and nothing reads it"


def test_each_setting_of_a_folder_is_refused_where_nothing_reads_it() -> None:
    judged = {"judge"}  # its folder refuses it, as it may stand beside any writer
    assert own_settings().keys() - judged <= {name for _, name in UNREAD}


@pytest.mark.parametrize("name", READ_BY_SOME)
def test_a_setting_that_has_its_default_asks_for_nothing(name: str) -> None:
    for method in (name for name, one in methods().items() if one.needs_draft):
        resolve({"draft": "a", name: SETTINGS[name].default}, Facts(has_draft=True), method=method)


def refused(make: Any, method: str, name: str) -> str:
    draft = "demo-draft" if methods()[method].needs_draft and name != "draft_address" else None
    with pytest.raises(SettingsError) as caught:
        make("demo-target", **{"draft": draft, "method": method, name: other(name)})
    return str(caught.value)


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
@pytest.mark.parametrize(("method", "name"), COVER)
def test_python_refuses_what_nothing_reads(make: Any, method: str, name: str) -> None:
    assert f"{name} {NOTHING}" in refused(make, method, name)


@pytest.mark.slow
@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_python_refuses_every_pair(make: Any) -> None:
    for method, name in UNREAD:
        assert f"{name} {NOTHING}" in refused(make, method, name), (method, name)


def _typed(method: str, name: str) -> list[str]:
    flag, value = f"--{name.replace('_', '-')}", other(name)
    method = f"{method} --draft demo-draft" if methods()[method].needs_parallel_draft else method
    if isinstance(value, bool):
        return [*f"--method {method}".split(), flag if value else f"--no-{flag[2:]}"]
    return [*f"--method {method}".split(), flag, typed(value)]


TYPED = [
    pair for pair in COVER if pair[1] not in ("max_nodes", "min_path_logprob", "start_timeout_s")
]  # in Python alone


@pytest.mark.parametrize(("method", "name"), [one for one in TYPED if one[1] not in ("image_dir", "hide_images")])
def test_the_command_line_refuses_what_nothing_reads(
    method: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_command(capsys, "generate", "hello", *_typed(method, name))
    assert ran.status == 2 and ran.err.count("\n") == 1 and NOTHING in ran.err, ran.err


ADAPTERS = declared(AdapterSettings)


@pytest.mark.parametrize("name", sorted(name for name, one in ADAPTERS.items() if one.readers))
def test_an_adapter_refuses_what_nothing_reads(name: str) -> None:
    whole: dict[str, Any] = {"draft": "a", "writers": ("beam", "store"), "suffix_store": "a"}
    with pytest.raises(SettingsError, match=f"{name} {NOTHING}"):
        AdapterSettings(**{name: other_value(AdapterSettings, name, **whole)})
    AdapterSettings(**{name: ADAPTERS[name].default})
