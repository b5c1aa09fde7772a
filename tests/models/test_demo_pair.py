"""The shipped pair: loads with plain transformers, agrees, and decodes the same text with every method."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from card import LLM, SamplingParams
from card.models.demo import DEMO_ANSWERS, DEMO_PROBLEMS, demo_folder
from card.models.loading import load_model, parameter_count
from card.models.text import encode_chat

ROLES = ("target", "draft")


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_problems_are_answered_right(dtype: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120)
    with LLM("demo-target", dtype=dtype) as llm:
        for problem, answer in DEMO_ANSWERS.items():
            text = llm.chat([{"role": "user", "content": problem}], params)[0].outputs[0].text
            assert text.endswith(f"\n#### {answer}"), (problem, text)


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


def test_draft_agrees_with_the_target_on_what_the_target_writes() -> None:
    target, draft = load_model("demo-target", dtype="float32"), load_model("demo-draft", dtype="float32")
    agreed = total = 0
    with LLM(target, tokenizer=AutoTokenizer.from_pretrained(demo_folder("target"))) as llm:
        for problem in DEMO_PROBLEMS[:6]:
            output = llm.chat([{"role": "user", "content": problem}], SamplingParams(temperature=0.0, max_tokens=120))[
                0
            ]
            written = output.outputs[0].token_ids
            ids = torch.tensor([[*output.prompt_token_ids, *written]])
            choices = draft(input_ids=ids).logits[0, -len(written) - 1 : -1].argmax(-1)
            agreed += int((choices == ids[0, -len(written) :]).sum())
            total += len(written)
    assert agreed / total > 0.75


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("method", "settings"), [("sps", {}), ("card", {}), ("card", {"verify": "tree"}), ("specbranch", {"hrad": "demo"})]
)
def test_every_method_writes_the_text_of_plain_decoding(method: str, settings: dict, temperature: float) -> None:
    target, draft = load_model("demo-target", dtype="float32"), load_model("demo-draft", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(demo_folder("target"))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=100)
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": problem}]) for problem in DEMO_PROBLEMS[:3]]
    with (
        LLM(target, tokenizer=tokenizer) as plain,
        LLM(target, draft, tokenizer=tokenizer, method=method, placement="inline", policy="fixed", **settings) as fast,
    ):
        for expected, got in zip(plain.generate(prompts, params), fast.generate(prompts, params), strict=True):
            assert got.outputs == expected.outputs
            assert got.stats.mean_acceptance_length > 1.5
