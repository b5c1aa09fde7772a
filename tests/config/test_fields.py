"""A setting is declared once: what is allowed follows from its type and bounds, in a check and in words."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from card.config import DraftSettings, EngineSettings, SamplingParams
from card.config.fields import check, declared, make_plain, setting
from card.errors import ProtocolError, SettingsError
from card.server.config import ServerSettings


@dataclass(frozen=True, kw_only=True)
class Kiln:
    needed: int = setting()
    heat: float = setting(20.0, "How hot it is.", least=0, below=math.inf, unit="degrees")
    door: Literal["open", "shut"] = "open"
    names: tuple[str, ...] = setting((), least=1, num_items=(0, 2), allowed="up to 2 names")
    shelf: int | None = setting(None, above=0, most=9, shown="all of them")
    is_lit: bool = False
    owner: str = ""


GOOD: list[dict[str, Any]] = [{}, {"heat": 5}, {"door": "shut"}, {"names": ("a", "b")}, {"shelf": 9}, {"is_lit": True}]
BAD: list[tuple[str, list[Any], str]] = [
    ("needed", ["1", 1.0, True, None], "a whole number"),
    ("heat", ["hot", True, None], "a number"),
    ("heat", [-1, math.nan], "0 or more degrees"),
    ("heat", [math.inf, -math.inf], "finite and 0 or more degrees"),
    ("door", ["ajar", None], "one of open, shut"),
    ("names", [("",), ("a", 1), ("a",) * 3, "ab", None], "up to 2 names"),
    ("shelf", [0, 10], "above 0 and at most 9"),
    ("shelf", [1.0], "a whole number or None"),
    ("is_lit", [1, None], "True or False"),
    ("owner", [3, None, ["a"]], "a string"),
    ("needed", [2**63, -(2**70)], "a number of 64 bits at most"),
]


def kiln(**values: Any) -> Kiln:
    return Kiln(**{"needed": 1} | values)


@pytest.mark.parametrize("values", GOOD)
def test_what_is_declared_may_stand(values: dict[str, Any]) -> None:
    check(kiln(**values))


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [(name, one, words) for name, all_, words in BAD for one in all_]
)
def test_anything_else_is_refused_in_words(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check(kiln(**{name: value}))
    assert str(caught.value) == f"{name} must be {allowed}, got {value!r}"


def test_a_user_of_settings_may_have_an_error_of_its_own() -> None:
    with pytest.raises(ProtocolError, match=r"^shelf of a kiln must be above 0 and at most 9, got 10$"):
        check(kiln(shelf=10), owner=" of a kiln", error=ProtocolError)


def test_paths_are_taken_as_their_names() -> None:
    one = kiln(owner=Path("a") / "b", names=[Path("c")])
    make_plain(one)
    check(one)
    assert (one.owner, one.names) == (str(Path("a") / "b"), ("c",))


def test_lists_may_be_given_as_one_value_or_any_run_of_them() -> None:
    for given, taken in (("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()), (iter("ab"), ("a", "b")), (5, 5)):
        one = kiln(names=given)
        make_plain(one)
        assert one.names == taken


def test_defaults_are_told_where_they_say_something() -> None:
    told = {name: one.shown for name, one in declared(Kiln).items()}
    assert {name: words for name, words in told.items() if words} == {
        "heat": "20",
        "door": "open",
        "shelf": "all of them",
    }


@pytest.mark.parametrize("kind", [SamplingParams, DraftSettings, EngineSettings, ServerSettings])
def test_every_setting_says_what_it_means_and_its_default_may_stand(kind: type) -> None:
    assert list(declared(kind)) == [one.name for one in dataclasses.fields(kind)]
    for name, one in declared(kind).items():
        assert one.rule.meaning.endswith("."), name
        assert one.fault(one.default) == "", name
        assert one.rule.allowed or not one.is_list, f"{name} is a list; say what may stand in it"
