"""What a request leaves open: the model's own generation config decides, else it is greedy, as far as it has room."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from card.api.llm import LLM
from card.config import SamplingParams
from card.models.facts import about_row_bytes, sampling_defaults
from card.models.loading import load_decoder
from tests.pair import Pair

PROMPT = "the cat sat"
SAMPLING = {"do_sample": True, "temperature": 2.5, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.2}
Open = Callable[..., LLM]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def open_with(pair: Pair, tmp_path: Path) -> Iterator[Open]:
    """Open the target with another generation config."""
    opened: list[LLM] = []

    def open_one(config: dict[str, Any], **settings: Any) -> LLM:
        folder = tmp_path / f"target-{len(opened)}"
        shutil.copytree(pair.target, folder)
        (folder / "generation_config.json").write_text(json.dumps(config))
        opened.append(LLM(str(folder), dtype="float32", method="vanilla", cache=False, **settings))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


def resolved(llm: LLM, **asked: Any) -> dict[str, Any]:
    params = llm.host.resolved(SamplingParams(**asked), 10)
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}


def test_a_model_without_a_word_is_answered_greedily_to_the_end_of_the_context(open_with: Open) -> None:
    llm = open_with({}, max_model_len=400)
    text = llm.generate(PROMPT, SamplingParams(ignore_eos=True))[0]
    assert len(text.prompt_token_ids) + len(text.outputs[0].token_ids) == 400, "more than any usual bound"
    assert text.outputs[0].finish_reason == "length"
    greedy = SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=40)
    assert llm.generate(PROMPT, greedy)[0].outputs[0].token_ids == text.outputs[0].token_ids[:40]


def test_a_model_is_sampled_as_its_makers_say_unless_the_request_says_otherwise(open_with: Open) -> None:
    llm = open_with(SAMPLING)
    theirs = {name: value for name, value in SAMPLING.items() if name != "do_sample"}
    assert resolved(llm) == theirs
    assert resolved(llm, temperature=0.0, top_k=0) == {**theirs, "temperature": 0.0, "top_k": 0}
    open_ones, stated = SamplingParams(seed=5, max_tokens=30), SamplingParams(seed=5, max_tokens=30, **theirs)
    assert llm.generate(PROMPT, open_ones)[0].outputs == llm.generate(PROMPT, stated)[0].outputs


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"temperature": 0.6}, 0.6),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "top_k": 64}, 1.0),
        ({"top_p": 0.9}, 0.0),
    ],
)
def test_the_temperature_of_a_generation_config_is_that_of_transformers(
    open_with: Open, config: dict[str, Any], temperature: float
) -> None:
    assert resolved(open_with(config))["temperature"] == temperature


def test_defaults_are_what_the_models_makers_recommend_and_nothing_else() -> None:
    def stated_by(config: GenerationConfig | None) -> dict[str, Any]:
        return sampling_defaults(SimpleNamespace(generation_config=config))  # type: ignore[arg-type]

    assert stated_by(None) == stated_by(GenerationConfig(eos_token_id=3)) == {}
    stated = GenerationConfig(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_new_tokens=50)
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 50}
    assert stated_by(stated) == wanted


def test_the_generation_config_can_be_left_aside(open_with: Open) -> None:
    llm = open_with({**SAMPLING, "max_new_tokens": 5}, generation_config="none")
    assert resolved(llm) == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    assert llm.host.bound_of(SamplingParams()) is None


def test_a_bound_of_the_generation_config_holds_where_the_request_states_none(open_with: Open) -> None:
    llm = open_with({"max_new_tokens": 5})
    lengths = [
        len(llm.generate(PROMPT, SamplingParams(ignore_eos=True, max_tokens=most))[0].outputs[0].token_ids)
        for most in (None, 9)
    ]
    assert lengths == [5, 9]


def test_the_rows_that_a_context_is_cut_by_take_what_a_runner_says(pair: Pair) -> None:
    with LLM(pair.target, dtype="float32", method="vanilla") as llm:
        model = load_decoder(pair.target, dtype="float32")
        assert about_row_bytes(model) == llm.host.runner.row_bytes
