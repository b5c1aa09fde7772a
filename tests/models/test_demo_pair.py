"""The shipped pair: loads with plain transformers, agrees, and decodes the same text with every method."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from card import LLM, RequestOutput, SamplingParams
from card.backends.transformers.loading import load_model
from card.models.demo import DEMO_ANSWERS, DEMO_PROBLEMS, demo_folder
from card.models.facts import parameter_count
from card.text.prompts import encode_chat

ROLES = ("target", "draft")
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


def test_pair_is_under_50_mb_in_bfloat16() -> None:
    files = [file for role in ROLES for file in demo_folder(role).iterdir()]
    assert sum(file.stat().st_size for file in files) < 50e6
    assert {load_model(f"demo-{role}").dtype for role in ROLES} == {torch.bfloat16}


@pytest.mark.parametrize("role", ROLES)
def test_model_loads_and_writes_with_plain_transformers(role: str) -> None:
    folder = demo_folder(role)  # type: ignore[arg-type]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    messages = [{"role": "user", "content": DEMO_PROBLEMS[0]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=120, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "<<" in tokenizer.decode(written), "it calculates, in the notation that it was trained on"
    if role == "target":
        assert written[-1].item() == tokenizer.eos_token_id, "the answer ends by itself"


def is_right(problem: str, text: str) -> bool:
    return text.endswith(f"\n#### {DEMO_ANSWERS[problem]}")


def test_the_demo_problems_are_answered_right_all_at_once_in_bfloat16() -> None:
    with LLM("demo-target", dtype="bfloat16", method="vanilla") as llm:
        answers = llm.chat([[{"role": "user", "content": problem}] for problem in DEMO_PROBLEMS], GREEDY)
        for problem, answer in zip(DEMO_PROBLEMS, answers, strict=True):
            text = answer.outputs[0].text
            assert is_right(problem, text), (problem, text)


def test_the_first_examples_ask_what_is_answered_right() -> None:
    root = Path(__file__).parents[2]
    asked = re.findall(r'card generate "([^".]{5,}[^"]*)"', (root / "README.md").read_text("utf-8"))
    assert asked, "the README shows a question to begin with"
    for path in (root / "README.md", root / "docs" / "server.md", *(root / "examples").glob("*.py")):
        asked += re.findall(r'"([^"\n]*\bHow m[^"\n]*\?)"', path.read_text("utf-8"))
    assert set(asked) <= DEMO_ANSWERS.keys()


def test_draft_is_a_few_million_parameters_beside_a_target_of_about_16() -> None:
    target, draft = (parameter_count(load_model(f"demo-{role}")) for role in ROLES)
    assert 14e6 < target < 18e6
    assert 3e6 < draft < 5e6


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    return {role: load_model(f"demo-{role}", dtype="float32") for role in ROLES}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_folder("target"))


@pytest.fixture(scope="module")
def plain(loaded: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[LLM]:
    with LLM(loaded["target"], tokenizer=tokenizer, method="vanilla") as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [encode_chat(tokenizer, [{"role": "user", "content": problem}]) for problem in DEMO_PROBLEMS]


@pytest.fixture(scope="module")
def answers(plain: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """What the target writes in float32."""
    return plain.generate(prompts, GREEDY)


def test_the_demo_problems_are_answered_right_all_at_once_in_float32(answers: list[RequestOutput]) -> None:
    texts = [one.outputs[0].text for one in answers]
    wrong = [pair for pair in zip(DEMO_PROBLEMS, texts, strict=True) if not is_right(*pair)]
    assert wrong == []


def test_draft_agrees_with_the_target_on_what_the_target_writes(
    loaded: dict[str, Any], answers: list[RequestOutput]
) -> None:
    agreed = total = 0
    for output in answers[:6]:
        written = output.outputs[0].token_ids
        ids = torch.tensor([[*output.prompt_token_ids, *written]])
        choices = loaded["draft"](input_ids=ids).logits[0, -len(written) - 1 : -1].argmax(-1)
        agreed += int((choices == ids[0, -len(written) :]).sum())
        total += len(written)
    assert agreed / total > 0.75


Expected = Callable[[SamplingParams], list[RequestOutput]]


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[list[int]]) -> Expected:
    """Return what plain decoding writes to a few problems at once."""
    return cache(lambda params: plain.generate(prompts[:3], params))


@pytest.mark.parametrize(
    ("method", "settings"), [("sps", {}), ("card", {}), ("card", {"verify": "tree"}), ("pearl", {})]
)
def test_every_method_writes_the_text_of_plain_decoding(
    loaded: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    expected: Expected,
    method: str,
    settings: dict[str, str],
) -> None:
    own = {"method": method, "placement": "inline", "policy": "fixed", **settings}
    with LLM(loaded["target"], loaded["draft"], tokenizer=tokenizer, **own) as fast:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=48)
            wanted = expected(params)
            prompts = [one.prompt_token_ids for one in wanted]
            for one, got in zip(wanted, fast.generate(prompts, params), strict=True):
                assert got.outputs == one.outputs
                assert got.stats.mean_acceptance_length > 1.5
