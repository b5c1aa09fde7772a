"""Arguments of the Python API beside the settings: paths and names are taken, anything else is refused by its name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from card import LLM, AsyncLLM, DraftSettings, SamplingParams
from card.config.registry import methods
from card.errors import PromptError, SettingsError
from card.models.demo import demo_folder

DEMO = demo_folder("target")
FEW = SamplingParams(max_tokens=3)
QUICK: dict[str, Any] = {"cache": False, "check": False, "policy": "fixed"}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("target", 3, "a folder, a GGUF file, the name of a model, or a loaded model"),
        ("target", None, "a folder, a GGUF file, the name of a model, or a loaded model"),
        ("target", "", "a folder, a GGUF file, the name of a model, or a loaded model"),
        ("draft", 3, "a folder, a GGUF file, the name of a model, or a loaded model, or None"),
        ("tokenizer", 3, "a tokenizer, the folder or name of one, or None"),
        ("method", ["card"], "a name or None"),
        ("verifier", None, "one such as card.tree.verify.MATCH, the default"),
        ("spare", 3, "a DrafterChild or None"),
        ("say", None, "a function that takes a text"),
        ("dtype", np.float32(1), "a string"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_its_name(kind: Any, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        kind(**{"target": "demo-target", name: value})
    assert str(caught.value).startswith(f"{name} must be {allowed}, got ")


@pytest.mark.parametrize("method", ["", "cards"])
def test_a_method_that_does_not_exist_is_refused_even_without_letters(method: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown method '{method}'") as caught:
        LLM(method=method)
    assert str(caught.value).endswith(f" known: {', '.join(methods())}")
    assert ("did you mean card? known" in str(caught.value)) == (method == "cards")


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, tokenizer=DEMO, **QUICK) as llm:
        yield llm


def test_models_and_tokenizers_may_be_paths_or_names(llm: LLM) -> None:
    wanted = llm.generate("hello", FEW)[0].outputs[0].token_ids
    assert llm.settings.target == str(DEMO)
    with LLM("demo-target", demo_folder("draft"), tokenizer="demo-target", method="sps", **QUICK) as other:
        assert other.generate("hello", FEW)[0].outputs[0].token_ids == wanted


def test_a_tokenizer_that_is_not_there_is_refused() -> None:
    with pytest.raises(Exception, match="there is no folder /nowhere/at/all") as caught:
        LLM(tokenizer=Path("/nowhere/at/all"), **QUICK)
    assert type(caught.value).__module__ == "card.errors"


def test_draft_settings_can_only_be_draft_settings(llm: LLM) -> None:
    with pytest.raises(SettingsError, match=r"draft_settings must be card.DraftSettings, got 3"):
        llm.draft_settings = 3  # type: ignore[assignment]
    llm.draft_settings = DraftSettings(budget=4)
    assert llm.draft_settings.budget == 4


@pytest.mark.parametrize("params", [0, {}, "", False])
def test_parameters_are_parameters_even_if_they_are_nothing(llm: LLM, params: Any) -> None:
    for ask in (llm.stream, llm.generate):
        with pytest.raises(SettingsError, match=r"must be card.SamplingParams, got"):
            ask("hello", params)


def test_scores_and_names_of_requests_are_refused_by_name() -> None:
    async def ask() -> None:
        async with AsyncLLM(**QUICK) as llm:
            for num_top in (-1, 21, 10**9, "1", 2.5, True):
                with pytest.raises(SettingsError, match="num_top must be a number of tokens from 0 to 20, got"):
                    await llm.score("hello there", num_top)  # type: ignore[arg-type]
            with pytest.raises(PromptError, match="a prompt must be a string or a list of token ids, got NoneType"):
                await llm.score(None, 1)  # type: ignore[arg-type]
            assert all(len(one.top) == 20 for one in await llm.score("hello there", np.int64(20)))  # type: ignore[arg-type]
            with pytest.raises(SettingsError, match="request_id must be a string or None, got 3"):
                llm.generate("hello", FEW, request_id=3)  # type: ignore[arg-type]
            with pytest.raises(SettingsError, match=r"must be card.SamplingParams, got \{\}"):
                llm.generate("hello", {})  # type: ignore[arg-type]

    asyncio.run(ask())
