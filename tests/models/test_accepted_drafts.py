"""Drafts that the target accepts, in chains and trees of any length: each text is the one of plain decoding.

A model with random weights never accepts another one's draft, so that little is ever committed at once. Here the target
drafts for itself, or a copy of it with a little noise does: 1.2 to 14 tokens a pass. How many a copy is right about is
the weights' matter: noise flips routes to experts, so theirs are right least. The law is that no right one is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from card.config import DraftSettings, SamplingParams
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.request import Request
from card.kernels.int8_linear import why_not_int8
from card.models.recording_runner import RecordingRunner
from tests.decoding import inline, make_engine, make_request, run_all
from tests.models.test_family_texts import NEW_IDS, choices, noisy, prompt_of, runner_of, running

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
LENGTHS = (5, 9, 13, 21)  # of prompts in one batch
NUM_NEW, NUM_MORE = 14, 5  # tokens of an answer, and of what is asked behind it
NOISES = (0.0, 0.02, 0.1)  # of the draft
LEAST_OF_SELF = 10.0  # tokens a pass where the target drafts for itself, by one method at least
# States, convolutions, sinks, shared rows: what is kept of a text differs most. `make test-models` takes all families.
QUICK = ("qwen3_5_text", "lfm2", "gpt_oss", "gemma4_text")
FAMILIES = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.models)
    for family in dict.fromkeys([*QUICK, *running()])
]
SHAPES = {
    "sps": [DraftSettings(num_speculative_tokens=length) for length in (3, 12)],
    "card": [
        DraftSettings(verify="tree", beam_width=3, branch=2, budget=16, lead=8, min_verify_prob=0.0),
        DraftSettings(verify="chain", beam_width=1, budget=14, lead=14, num_speculative_tokens=14, min_verify_prob=0.0),
    ],
}
GREEDY, SAMPLED = (SamplingParams(temperature=t, seed=7, max_tokens=NUM_NEW) for t in (0.0, 0.8))


@dataclass(frozen=True)
class Turns:
    """Two turns of four requests, of which one is given up in the second."""

    texts: list[list[int]]
    second: list[tuple[Request, list[int]]]  # what was asked in the second turn, with its text
    passes: int  # of the target in the second turn, without the prompts'

    @property
    def tokens_a_pass(self) -> float:
        return sum(len(text) for _, text in self.second) / self.passes


def turns_of(engine: Engine, method: str, draft: DraftSettings | None) -> Turns:
    uses = {"method": method, "uses_drafter": method != "vanilla", "draft": draft}
    params = (GREEDY, SAMPLED, GREEDY, SAMPLED)
    first = [
        make_request(next(NEW_IDS), prompt=prompt_of(length), params=one, **uses)
        for length, one in zip(LENGTHS, params, strict=True)
    ]
    written = run_all(engine, {0: first})
    answers = [written[request.request_id][0] for request in first]
    second = [
        make_request(next(NEW_IDS), prompt=(*request.prompt_ids, *answer, *range(3, 3 + NUM_MORE)), params=one, **uses)
        for request, answer, one in zip(first, answers, params, strict=True)
    ]
    passes, texts = 0, {request.request_id: list[int]() for request in second}
    for request in second:
        engine.add(engine.check(request))
    while engine.has_work:
        for update in engine.step():
            texts[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                passes += update.stats.target_passes
        engine.abort(second[1].request_id)
    ended = [(request, texts[request.request_id]) for request in second if request is not second[1]]
    return Turns([*answers, *(text for _, text in ended)], ended, passes)


@functools.lru_cache(2)
def plain_turns(family: str) -> Turns:
    return turns_of(make_engine(runner_of(family), None, "vanilla", limits=Limits(prefill_chunk=11)), "vanilla", None)


def passes_with(right: Sequence[bool], length: int) -> int:
    """Return how many passes a text takes behind its first token, if chains of this length are drafted before each.

    Args:
        right: whether the draft model, given all before it, chooses the token at each place of the text.
    """
    place, passes = 1, 0
    while place < len(right):
        chain = right[place : place + length]
        place, passes = place + 1 + (chain.index(False) if False in chain else len(chain)), passes + 1
    return passes


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_plain_ones_however_many_drafted_tokens_are_accepted(family: str) -> None:
    runner, plain = runner_of(family), plain_turns(family)
    for noise in NOISES:
        copy, reached = noisy(family, noise), 0.0
        right = [
            [a == b for a, b in zip(choices(copy, request, text), text, strict=True)] for request, text in plain.second
        ]
        for method, shapes in SHAPES.items():
            for draft in shapes:
                link = inline(runner_of(family, noise))
                engine = make_engine(runner, link, method, limits=Limits(prefill_chunk=11))
                turns = turns_of(engine, method, draft)
                assert turns.texts == plain.texts, (noise, method, draft)
                if method == "sps":
                    fewest = sum(passes_with(one, draft.num_speculative_tokens) for one in right)
                    assert turns.passes == fewest, (noise, draft)
                reached = max(reached, turns.tokens_a_pass)
        assert noise or reached >= LEAST_OF_SELF, reached


def test_the_quick_families_keep_all_that_a_family_can_keep() -> None:
    assert {isinstance(runner_of(family), RecordingRunner) for family in QUICK} == {True, False}
