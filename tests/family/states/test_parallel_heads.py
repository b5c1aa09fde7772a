"""Heads of several tokens a pass (P-EAGLE) draft with the numbers of plain formulas, and change no text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from card import LLM, SamplingParams
from tests.drafts import draft_spec
from tests.own_head import PARALLEL_FORMS, Head, drafting_of, random_head
from tests.state_drafting import PROMPTS, TEXT, assert_close, assert_texts_are_plain

pytestmark = pytest.mark.timeout(240)
TARGET_OF = "SpecForge"


@functools.cache
def random_of(form: str) -> Head:
    return random_head(PARALLEL_FORMS[form])


@pytest.mark.parametrize("form", PARALLEL_FORMS)
@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_one_pass_gives_the_logits_of_the_formulas(target: str, folder: Any, form: str, num_accepted: int) -> None:
    head = random_of(form)
    drafting = drafting_of(target, folder(form), head)
    sequence, text, new_ids = drafting.open(TEXT), list(TEXT), [7]
    drafting.show(sequence, text)
    for _ in range(3):  # rejected at a depth, each time
        sequence.commit(new_ids)
        text += new_ids
        drafting.step(sequence)
        expected = head.draft_at_once(text)
        (found, _), chain = drafting.passes[-1][0], drafting.path(sequence)
        assert len(found) == head.form.num_tokens
        for row, logits in zip(found, expected, strict=True):
            assert_close(row, logits)
        assert chain == expected.argmax(-1).tolist()
        assert sequence.frontier() == [], "no pass goes on from a candidate"
        new_ids = [*chain[:num_accepted], (chain[num_accepted] + 1) % 299]
        drafting.show(sequence, [*text, *new_ids[:-1]], len(text) - 1)


def test_a_prompt_in_chunks_and_little_room_for_masks_give_the_same_first_logits(target: str, folder: Any) -> None:
    head = random_of("SpecForge")
    drafting = drafting_of(target, folder("SpecForge"), head)
    sequence = drafting.open(TEXT)
    drafting.show(sequence, TEXT)
    sequence.commit([7])
    while not drafting.path(sequence):
        drafting.step(sequence, most=3)
    (found, _) = drafting.passes[-1][0]
    expected = head.draft_at_once([*TEXT, 7])
    for row, logits in zip(found, expected[: len(found)], strict=True):
        assert_close(row, logits)


def test_all_nodes_of_a_layer_have_the_logits_of_its_mask(target: str, folder: Any) -> None:
    head = random_of("SpecForge")
    drafting = drafting_of(target, folder("SpecForge"), head)
    drafting.spec = draft_spec(vocab_size=0, beam_width=3, branch=3, lead=3, growth="layer")
    sequence = drafting.open(TEXT)
    drafting.show(sequence, TEXT)
    sequence.commit([7])
    drafting.step(sequence)
    best = np.sort(head.draft_at_once([*TEXT, 7]).argsort(-1, descending=True)[:3, :3].numpy())
    cache = sequence.cache
    by_depth: dict[int, set[int]] = {}
    for node in cache.alive_ids():
        by_depth.setdefault(cache.depth_of(node), set()).add(cache.token(node))
    for depth, tokens in by_depth.items():
        if depth:
            assert tokens <= set(best[depth - 1].tolist())
    assert max(by_depth) == 3


@pytest.mark.parametrize(("placement", "method"), [("inline", "sps"), ("thread", "card"), ("inline", "card")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(
    target: str, folder: Any, placement: Any, method: str, temperature: float
) -> None:
    assert_texts_are_plain(target, folder("speculators"), method=method, placement=placement, temperature=temperature)


def test_a_text_that_fills_the_context_is_written_to_its_end(target: str, folder: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"target": target, "dtype": "float32", "max_model_len": 24}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(**settings, method="vanilla") as llm:
        expected = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    with LLM(**settings, draft=folder("SpecForge"), method="sps", placement="inline") as llm:
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == expected
