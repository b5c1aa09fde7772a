"""Settings: a bad value raises with its name, what it was and what is allowed; good ones are never changed silently."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from card.config import DraftSettings, EngineSettings, SamplingParams
from card.errors import CardError, SettingsError

Kind = type[SamplingParams] | type[DraftSettings] | type[EngineSettings]
KINDS: list[Kind] = [SamplingParams, DraftSettings, EngineSettings]
NAN, INF = math.nan, math.inf

BAD: list[tuple[Kind, str, list[Any], str]] = [
    (SamplingParams, "temperature", [-0.1, INF, NAN], "0 or more"),
    (SamplingParams, "top_k", [-1], "0 (keep all) or more"),
    (SamplingParams, "top_p", [0.0, -0.5, 1.01, NAN], "above 0 and at most 1"),
    (SamplingParams, "min_p", [-0.1, 1.0, NAN], "at least 0 and below 1"),
    (SamplingParams, "seed", [-1, 2**63], "an integer from 0 to 2**63 - 1"),
    (SamplingParams, "max_tokens", [0, -3], "1 or more"),
    (SamplingParams, "stop", [("",), ("a", "")], "a list of strings that are not empty"),
    (SamplingParams, "stop_token_ids", [(-1,), (4, -2)], "a list of ids of 0 or more"),
    (DraftSettings, "verify", ["forest", None], "one of chain, tree, trunk"),
    (DraftSettings, "min_path_logprob", [0.0, 1.0, NAN], "below 0"),
    (DraftSettings, "min_verify_prob", [-0.1, 1.0, NAN], "at least 0 and below 1"),
    (DraftSettings, "max_wait_s", [-1e-9, NAN], "0 or more seconds"),
    (DraftSettings, "growth", ["deep", None], "one of layer, best-first, branch, fan-out"),
    (DraftSettings, "branch_below", [-0.1, 1.1, NAN], "from 0 to 1"),
    (DraftSettings, "fan_out", [(), (3,) * 65, (-1,), (2.0,), (True,), 2.5, "3"], "1 to 64 whole numbers of 0 or more"),
    (DraftSettings, "max_nodes", [5], "at least beam_width (6)"),
    *(
        (DraftSettings, name, [0, -1], "1 or more")
        for name in ("beam_width", "branch", "budget", "lead", "max_nodes", "num_speculative_tokens", "min_depth")
    ),
    (EngineSettings, "placement", ["moon"], "one of inline, thread, process"),
    (EngineSettings, "threads", [0], "1 or more"),
    (EngineSettings, "writers", [(), (1,)], "a list of names"),
    (EngineSettings, "suffix_store_tokens", [0], "1 or more"),
    (EngineSettings, "draft_threads", [0], "1 or more"),
    (EngineSettings, "start_timeout_s", [0.0, -1.0, NAN], "above 0 seconds"),
    (EngineSettings, "drafter_timeout_s", [0.0, NAN], "above 0 seconds"),
    (EngineSettings, "max_model_len", [1, 0], "2 or more"),
]
GOOD: list[tuple[Kind, dict[str, Any]]] = [
    (SamplingParams, {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "seed": 2**63 - 1, "max_tokens": 1}),
    (SamplingParams, {"temperature": 9.0, "top_k": 10**9, "top_p": 1e-9, "min_p": 0.999, "seed": 0}),
    (DraftSettings, {"verify": "tree", "beam_width": 1, "branch": 1, "budget": 1, "lead": 1, "max_nodes": 1}),
    (DraftSettings, {"growth": "branch", "branch_below": 0.0, "fan_out": (0,) * 64}),
    (DraftSettings, {"growth": "fan-out", "branch_below": 1, "fan_out": (0, 256)}),
    (EngineSettings, {"writers": ("beam",), "suffix_store_tokens": 1}),
    (EngineSettings, {"placement": "inline", "threads": 1, "max_model_len": 2}),
]


@pytest.mark.parametrize(
    ("kind", "name", "value", "allowed"),
    [(kind, name, value, allowed) for kind, name, values, allowed in BAD for value in values],
)
def test_a_bad_value_raises_with_its_name_and_what_is_allowed(kind: Kind, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        kind(**{name: value})
    assert str(caught.value) == f"{name} must be {allowed}, got {value!r}"
    with pytest.raises(SettingsError, match=name):
        kind().replace(**{name: value})


@pytest.mark.parametrize(("kind", "values"), GOOD)
def test_values_at_the_bounds_are_taken_as_they_are(kind: Kind, values: dict[str, Any]) -> None:
    taken = kind(**values)
    assert {name: getattr(taken, name) for name in values} == values


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_raises_and_the_known_ones_are_listed(kind: Kind) -> None:
    with pytest.raises(SettingsError, match=r"unknown setting 'tempratur'; known: ") as caught:
        kind().replace(tempratur=1)
    for field in dataclasses.fields(kind):
        assert field.name in str(caught.value)
    with pytest.raises(TypeError):
        kind(tempratur=1)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_frozen_and_a_copy_leaves_them_alone(kind: Kind) -> None:
    settings = kind()
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, name, getattr(settings, name))
    assert settings.replace() == settings
    assert hash(settings.replace()) == hash(settings)


def test_replace_changes_what_is_named_and_nothing_else() -> None:
    params = SamplingParams(temperature=0.5, seed=3)
    assert params.replace(top_k=4) == SamplingParams(temperature=0.5, seed=3, top_k=4)
    assert params == SamplingParams(temperature=0.5, seed=3)


def test_stop_may_be_one_string_or_a_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_fan_out_and_writers_may_be_one_or_a_list() -> None:
    assert DraftSettings(fan_out=3).fan_out == (3,)  # type: ignore[arg-type]
    assert DraftSettings(fan_out=[3, 1]).fan_out == (3, 1)  # type: ignore[arg-type]
    assert EngineSettings(writers="beam").writers == ("beam",)  # type: ignore[arg-type]
    assert EngineSettings(writers=["beam", "lookup"]).writers == ("beam", "lookup")  # type: ignore[arg-type]


def test_settings_errors_can_be_caught_as_card_errors_and_as_value_errors() -> None:
    assert issubclass(SettingsError, CardError)
    assert issubclass(SettingsError, ValueError)
