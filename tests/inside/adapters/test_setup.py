"""A proposer from settings, with a real drafter in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from card.errors import SettingsError, WorkerError
from card.inside.adapters.proposer import ChainProposer
from card.inside.adapters.settings import AdapterSettings
from card.inside.adapters.setup import make_proposer
from card.links.background import BackgroundLink
from card.links.process import ProcessLink
from tests.pair import Pair
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def make(pair: Pair) -> Iterator[Callable[..., ChainProposer]]:
    made: list[ChainProposer] = []

    def make(**given: object) -> ChainProposer:
        settings = AdapterSettings.from_mapping(
            {"draft": pair.draft, "draft_dtype": "float32", "drafter_timeout_s": PATIENCE_S, **given}
        )
        made.append(
            make_proposer(settings, vocab_size=320, max_model_len=512, num_speculative_tokens=4, tokenizer=None)
        )
        return made[-1]

    yield make
    for proposer in made:
        proposer.close()


@pytest.fixture(scope="module")
def drafted(pair: Pair) -> list[int]:
    """A text that the draft model would write."""
    model = LlamaForCausalLM.from_pretrained(pair.draft, dtype=torch.float32)
    made = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=400, do_sample=False, eos_token_id=319)
    return made[0].tolist()


def step(proposer: ChainProposer, text: list[int]) -> list[int]:
    """Let the engine commit the last token of the text."""
    tokens = np.zeros((1, 512), np.int32)
    tokens[0, : len(text)] = text
    return proposer.propose([[text[-1]]], [len(text)], tokens)[0]


def test_a_killed_drafter_is_replaced_and_the_request_is_drafted_on(
    make: Callable[..., ChainProposer], drafted: list[int]
):
    proposer = make(writers="beam", row_cost=0.0)
    ends = iter(range(4, len(drafted)))

    def has_candidates() -> bool:
        time.sleep(0.1)  # nobody else waits for the drafter
        return bool(step(proposer, drafted[: next(ends)]))

    link = proposer.link
    assert isinstance(link, BackgroundLink)
    assert isinstance(link.link, ProcessLink)
    until(has_candidates)
    pid = link.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: link.status.state != "up")
    until(lambda: link.status.num_restarts == 1 and link.status.state == "up")
    until(has_candidates)


def test_a_draft_model_that_is_not_there_is_one_line_or_costs_candidates_only(
    make: Callable[..., ChainProposer], pair: Pair
):
    with pytest.raises(WorkerError) as caught:
        make(draft=pair.missing)
    assert "\n" not in str(caught.value)
    assert step(make(draft=pair.missing, draft_optional=True), [1, 2, 3]) == []


def test_a_malformed_address_is_refused_at_once():
    settings = AdapterSettings.from_mapping({"draft_address": "somewhere"})
    with pytest.raises(SettingsError):
        make_proposer(settings, vocab_size=8, max_model_len=64, num_speculative_tokens=4, tokenizer=None)
