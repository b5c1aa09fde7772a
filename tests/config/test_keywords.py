"""The settings as keyword arguments are those that are declared, so that what an editor completes is what counts."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, Unpack, get_args, get_origin, get_type_hints

import pytest

from card import LLM, AsyncLLM, CompletionOutput, EngineStats, Grammar, LLMSettings, RequestOutput, StreamChunk
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.config.fields import declared
from card.config.keywords import NAMED_ARGUMENTS
from card.config.registry import own_kinds
from card.config.splitting import engine_settings


def as_given(hint: Any) -> Any:
    """Return the type by which a field is given: for a list one value alone, or any run of them."""
    if get_origin(hint) is tuple:
        (kind, _) = get_args(hint)
        return kind | Sequence[kind]
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(as_given(arm) for arm in get_args(hint))]  # noqa: UP007  # of a number that varies
    return hint


def test_every_setting_is_a_keyword_argument_of_its_own_type() -> None:
    kinds = (EngineSettings, DraftSettings, *own_kinds())
    fields = {name: get_type_hints(kind)[name] for kind in kinds for name in declared(kind) if name != "own"}
    wanted = {name: as_given(hint) for name, hint in fields.items() if name not in NAMED_ARGUMENTS}
    assert get_type_hints(LLMSettings) == wanted
    assert not LLMSettings.__required_keys__


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_engine_takes_those_settings(kind: type) -> None:
    unseen = {"PreTrainedTokenizerBase": object}
    hints = get_type_hints(kind.__init__, {**vars(typing), **unseen, **vars(inspect.getmodule(kind))})
    assert hints["settings"] == Unpack[LLMSettings]
    named = set(inspect.signature(kind).parameters) - {"settings"}
    assert named & get_type_hints(EngineSettings).keys() == NAMED_ARGUMENTS
    assert not named & get_type_hints(LLMSettings).keys()


def test_the_help_of_the_settings_tells_each_with_its_default_and_its_meaning() -> None:
    told = (LLMSettings.__doc__ or "").splitlines()
    assert "    budget = 16: Most candidates verified in one target pass." in told
    assert "    threads = None: CPU threads of the target. None: the fastest." in told
    for name in engine_settings().keys() - NAMED_ARGUMENTS:
        assert sum(line.startswith(f"    {name} = ") for line in told) == 1


@pytest.mark.parametrize("kind", [SamplingParams, DraftSettings])
def test_the_help_of_parameters_tells_each_in_python_s_words(kind: type) -> None:
    told = (kind.__doc__ or "").splitlines()
    for name in declared(kind):
        assert sum(line.startswith(f"    {name} = ") for line in told) == 1
    assert "--" not in "".join(told) + (LLMSettings.__doc__ or "")


@pytest.mark.parametrize("kind", [CompletionOutput, EngineStats, Grammar, RequestOutput, StreamChunk])
def test_the_help_of_what_is_returned_tells_each_field(kind: type) -> None:
    listed = re.search(r"Attributes:\n(.*)", inspect.getdoc(kind) or "", re.DOTALL)
    assert listed is not None
    told = [name for names in re.findall(r"^    ([a-z_, ]+):", listed[1], re.MULTILINE) for name in names.split(", ")]
    assert sorted(told) == sorted(field.name for field in dataclasses.fields(kind))
