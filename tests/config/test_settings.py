"""Settings: a bad value raises with its name, what it was and what is allowed; good ones are never changed silently."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from card.config import DraftSettings, EngineSettings, Grammar, SamplingParams
from card.config.splitting import split_settings
from card.errors import CardError, SettingsError, known_instead

Kind = type[SamplingParams] | type[DraftSettings] | type[EngineSettings]
KINDS: list[Kind] = [SamplingParams, DraftSettings, EngineSettings]
NAN, INF = math.nan, math.inf

BAD: list[tuple[Kind, str, list[Any], str]] = [
    (SamplingParams, "temperature", [-0.1, NAN], "0 or more"),
    (SamplingParams, "temperature", [INF], "finite and 0 or more"),
    (SamplingParams, "top_k", [-1], "0 (keep all) or more"),
    (SamplingParams, "top_p", [0.0, -0.5, 1.01, NAN], "above 0 and at most 1"),
    (SamplingParams, "min_p", [-0.1, 1.0, NAN], "at least 0 and below 1"),
    (SamplingParams, "seed", [-1, 2**63], "an integer from 0 to 2**63 - 1"),
    (SamplingParams, "max_tokens", [0, -3], "1 or more"),
    (SamplingParams, "stop", [("",), ("a", "")], "a list of strings that are not empty"),
    (SamplingParams, "stop_token_ids", [(-1,), (4, -2)], "a list of ids of 0 or more"),
    (SamplingParams, "presence_penalty", [-2.1, 2.1, NAN], "from -2 to 2"),
    (SamplingParams, "frequency_penalty", [-2.1, 2.1, NAN], "from -2 to 2"),
    (SamplingParams, "repetition_penalty", [0.0, -1.0, NAN], "above 0, 1 changes nothing"),
    (SamplingParams, "repetition_penalty", [INF], "finite and above 0, 1 changes nothing"),
    (SamplingParams, "min_tokens", [-1], "0 or more"),
    (SamplingParams, "logprobs", [-1, 21, 2.0, True], "None or a number of alternatives from 0 to 20"),
    (SamplingParams, "logit_bias", [[(1, 2.0)], "5"], "a mapping of token ids to numbers"),
    (SamplingParams, "grammar", ["json_object", {}], "a card.Grammar or None"),
    (SamplingParams, "speculates", [1, None], "True or False"),
    (DraftSettings, "verify", ["forest", None], "one of chain, tree, trunk"),
    (DraftSettings, "min_path_logprob", [0.0, 1.0, NAN], "below 0"),
    (DraftSettings, "min_verify_prob", [-0.1, 1.0, NAN], "at least 0 and below 1"),
    (DraftSettings, "max_wait_s", [-1e-9, NAN], "0 or more seconds"),
    (DraftSettings, "growth", ["deep", None], "one of layer, best-first, branch, fan-out, phrases"),
    (DraftSettings, "branch_below", [-0.1, 1.1, NAN], "from 0 to 1"),
    (
        DraftSettings,
        "fan_out",
        [(), (3,) * 65, (-1,), (2.0,), (True,), 2.5, "3"],
        "1 to 64 whole numbers from 0 to 256",
    ),
    (DraftSettings, "max_nodes", [5], "at least beam_width (6)"),
    *(
        (DraftSettings, name, [0, -1, most + 1], f"from 1 to {most}")
        for name, most in (("beam_width", 256), ("branch", 256), ("lead", 4096), ("num_speculative_tokens", 4096))
    ),
    *((DraftSettings, name, [0, 65537, 2**31], "from 1 to 65536") for name in ("budget", "max_nodes")),
    (DraftSettings, "min_depth", [0, -1], "1 or more"),
    (EngineSettings, "placement", ["moon"], "one of inline, thread, process"),
    (EngineSettings, "threads", [0, 1025], "from 1 to 1024"),
    (EngineSettings, "writers", [(), (1,)], "a list of names"),
    (EngineSettings, "dtype", [3, None], "a string"),
    (EngineSettings, "max_num_seqs", [2**63], "a number of 64 bits at most"),
    (EngineSettings, "draft_threads", [0, 2**31], "from 1 to 1024"),
    (EngineSettings, "start_timeout_s", [0.0, -1.0, NAN], "above 0 seconds"),
    (EngineSettings, "drafter_timeout_s", [0.0, NAN], "above 0 seconds"),
    (EngineSettings, "max_model_len", [1, 0], "2 or more"),
    (
        EngineSettings,
        "cache_dir",
        [""],
        "a folder; leave it out for the usual one, and set cache to False to keep nothing",
    ),
]
GOOD: list[tuple[Kind, dict[str, Any]]] = [
    (SamplingParams, {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "seed": 2**63 - 1, "max_tokens": 1}),
    (SamplingParams, {"temperature": 9.0, "top_k": 10**9, "top_p": 1e-9, "min_p": 0.999, "seed": 0}),
    (SamplingParams, {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e-9, "logprobs": 20}),
    (SamplingParams, {"min_tokens": 7, "max_tokens": 7, "logit_bias": {0: -100.0, 10**6: 100.0}, "logprobs": 0}),
    (DraftSettings, {"verify": "tree", "beam_width": 1, "branch": 1, "budget": 1, "lead": 1, "max_nodes": 1}),
    (DraftSettings, {"growth": "branch", "branch_below": 0.0, "fan_out": (0,) * 64}),
    (DraftSettings, {"growth": "fan-out", "branch_below": 1, "fan_out": (0, 256)}),
    (EngineSettings, {"writers": ("beam",)}),
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
    for make in (kind, kind().replace):
        with pytest.raises(SettingsError, match=r"unknown setting 'colour'; known: ") as caught:
            make(colour=1)
        for field in dataclasses.fields(kind):
            assert field.name in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "typo", "meant"),
    [
        (SamplingParams, "tempratur", "temperature"),
        (SamplingParams, "max_new_tokens", "max_tokens"),
        (SamplingParams, "Top_P", "top_p"),
        (DraftSettings, "bugdet", "budget"),
        (EngineSettings, "thread", "threads"),
    ],
)
def test_a_typo_raises_with_the_name_that_was_meant(kind: Kind, typo: str, meant: str) -> None:
    for make in (kind, kind().replace):
        with pytest.raises(SettingsError) as caught:
            make(**{typo: 1})
        assert str(caught.value) == f"unknown setting '{typo}'; did you mean {meant}?"


def test_a_typo_among_settings_of_both_kinds_is_told_alike() -> None:
    with pytest.raises(SettingsError, match=r"^unknown setting 'bugdet'; did you mean budget\?$"):
        split_settings({"threads": 1, "bugdet": 3})
    with pytest.raises(SettingsError, match=r"^unknown setting 'targe'; did you mean target\?$"):
        split_settings({"targe": "demo-target"})


def test_a_name_of_any_length_is_answered_with_the_known_ones() -> None:
    assert known_instead("x" * 10**7, ["a", "b"]) == "known: a, b"


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


def test_what_a_request_leaves_open_is_as_the_model_says_and_else_greedy() -> None:
    open_ones, stated = SamplingParams(), SamplingParams(temperature=0.0, top_k=3, max_tokens=9, seed=4)
    neutral = open_ones.resolved(room=70)
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (0.0, 0, 1.0, 0.0)
    assert (neutral.repetition_penalty, neutral.max_tokens) == (1.0, 70)
    theirs = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 50}
    as_theirs = open_ones.resolved(theirs, room=70)
    assert {name: getattr(as_theirs, name) for name in theirs} == theirs
    own = stated.resolved(theirs, room=70)
    assert (own.temperature, own.top_k, own.max_tokens, own.seed, own.top_p) == (0.0, 3, 9, 4, 0.8)
    assert own.resolved({"temperature": 1.0}, room=1) == own, "nothing is left open any more"


def test_a_seed_is_drawn_once_and_tiny_factors_are_lifted() -> None:
    assert len({SamplingParams().resolved().seed for _ in range(20)}) > 1
    one = SamplingParams(temperature=1e-30, repetition_penalty=1e-30).resolved({"top_p": 1e-30})
    assert (one.temperature, one.top_p, one.repetition_penalty) == (1e-6, 1e-6, 1e-6)
    great = SamplingParams(temperature=1e300, repetition_penalty=1e300).resolved()
    assert (great.temperature, great.repetition_penalty) == (1e30, 1e30)


def test_min_tokens_needs_no_max_tokens_but_room() -> None:
    assert SamplingParams(min_tokens=300).resolved(room=300).max_tokens == 300
    with pytest.raises(SettingsError, match=r"min_tokens must be from 0 to max_tokens \(299\), got 300"):
        SamplingParams(min_tokens=300).resolved(room=299)
    with pytest.raises(SettingsError, match="min_tokens must be 0 or more, got -1"):
        SamplingParams(min_tokens=-1)


def test_stop_may_be_one_string_or_a_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_fan_out_and_writers_may_be_one_or_a_list() -> None:
    assert DraftSettings(fan_out=3).fan_out == (3,)  # type: ignore[arg-type]
    assert DraftSettings(fan_out=[3, 1]).fan_out == (3, 1)  # type: ignore[arg-type]
    assert EngineSettings(writers="beam").writers == ("beam",)  # type: ignore[arg-type]
    assert EngineSettings(writers=["beam", "lookup"]).writers == ("beam", "lookup")  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda value: value], ids=["array", "tensor", "plain"])
def test_numbers_of_other_packages_are_taken_as_plain_ones(make: Any) -> None:
    params = SamplingParams(
        temperature=make(np.float32(0.5)),
        top_p=make(np.float64(0.25)),
        seed=make(np.int64(7)),
        max_tokens=make(np.int32(9)),
        ignore_eos=make(np.bool_(True)),
        stop_token_ids=[make(np.int64(3)), 4],  # type: ignore[arg-type]
        logit_bias={np.int64(5): make(np.float32(1.5)), 6: np.int64(2)},
    )
    plain = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        seed=7,
        max_tokens=9,
        ignore_eos=True,
        stop_token_ids=(3, 4),
        logit_bias={5: 1.5, 6: 2.0},
    )
    assert params == plain
    assert repr(params) == repr(plain), "not even their kinds differ"
    assert params.replace(seed=make(np.int64(8))) == plain.replace(seed=8)
    assert repr(EngineSettings(threads=make(np.int64(2)))) == repr(EngineSettings(threads=2))
    assert repr(DraftSettings(max_wait_s=make(np.float32(2)))) == repr(DraftSettings(max_wait_s=2.0))


def test_lists_may_be_arrays_or_tensors() -> None:
    for ids in (np.array([1, 2]), torch.tensor([1, 2])):
        assert repr(SamplingParams(stop_token_ids=ids).stop_token_ids) == "(1, 2)"  # type: ignore[arg-type]
        assert repr(EngineSettings(cores=ids).cores) == "(1, 2)"  # type: ignore[arg-type]
    assert repr(DraftSettings(fan_out=np.array(3)).fan_out) == "(3,)"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": np.float32("nan")}, "temperature must be 0 or more, got nan"),
        ({"temperature": np.array(math.inf)}, "temperature must be finite and 0 or more, got inf"),
        ({"temperature": np.array([0.5])}, "temperature must be a number or None, got array([0.5])"),
        ({"seed": np.float64(1.0)}, "seed must be an integer from 0 to 2**63 - 1, got 1.0"),
        ({"seed": np.uint64(2**63)}, f"seed must be an integer from 0 to 2**63 - 1, got {2**63}"),
        ({"seed": np.bool_(True)}, "seed must be an integer from 0 to 2**63 - 1, got True"),
        ({"max_tokens": np.int64(0)}, "max_tokens must be 1 or more, got 0"),
        ({"stop_token_ids": np.array([1.0])}, "stop_token_ids must be a list of ids of 0 or more, got (1.0,)"),
        (
            {"logit_bias": {5: np.float32("nan")}},
            "the logit_bias of token 5 must be a number from -100 to 100, got nan",
        ),
        ({"logit_bias": {np.float32(5): 1}}, "a token of logit_bias must be an id of 0 or more, got 5.0"),
    ],
)
def test_a_number_of_another_package_is_refused_like_a_plain_one(values: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == said


def test_settings_errors_can_be_caught_as_card_errors_and_as_value_errors() -> None:
    assert issubclass(SettingsError, CardError)
    assert issubclass(SettingsError, ValueError)


@pytest.mark.parametrize(
    ("biases", "said"),
    [
        ({-1: 1.0}, "a token of logit_bias must be an id of 0 or more, got -1"),
        ({"5": 1.0}, "a token of logit_bias must be an id of 0 or more, got '5'"),
        ({True: 1.0}, "a token of logit_bias must be an id of 0 or more, got True"),
        ({5: 100.1}, "the logit_bias of token 5 must be a number from -100 to 100, got 100.1"),
        ({5: NAN}, "the logit_bias of token 5 must be a number from -100 to 100, got nan"),
        ({5: "1"}, "the logit_bias of token 5 must be a number from -100 to 100, got '1'"),
    ],
)
def test_a_bias_that_is_none_is_refused_by_its_token(biases: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        SamplingParams(logit_bias=biases)


def test_parameters_with_biases_and_a_grammar_can_be_compared_hashed_and_copied() -> None:
    given = {7: 1.5, 3: -2}
    params = SamplingParams(logit_bias=given, grammar=Grammar("regex", "a+"))
    given[7] = 99.0
    assert params.logit_bias == {3: -2.0, 7: 1.5}, "what the caller does afterwards changes nothing"
    same = SamplingParams(logit_bias={3: -2.0, 7: 1.5}, grammar=Grammar("regex", "a+"))
    assert params == same
    assert hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params.replace(seed=None) == params
    assert params != params.replace(logit_bias={})
    with pytest.raises(TypeError):
        params.logit_bias[3] = 0.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("xml", "a", "kind of a grammar must be one of json_object, json_schema, regex, lark, gbnf, got 'xml'"),
        ("regex", " ", "source of a grammar must be a regex that is not empty, got ' '"),
        ("json_schema", "", "source of a grammar must be a json_schema that is not empty"),
        ("json_schema", {"type": "object"}, "source of a grammar must be a string, got {'type': 'object'}"),
        ("json_object", "{}", "source of a grammar must be empty for json_object"),
    ],
)
def test_a_grammar_that_cannot_be_meant_is_refused(kind: Any, source: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        Grammar(kind, source)


def test_a_grammar_ends_the_text_itself() -> None:
    with pytest.raises(SettingsError, match="ignore_eos contradicts a required form of the text"):
        SamplingParams(ignore_eos=True, grammar=Grammar("json_object"))
