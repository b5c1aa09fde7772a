"""A drafter that takes turns with somebody else's engine: it changes no text, and drafts as far as that pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import DrafterMessage
from card.inside.adapters.proposer import ChainProposer
from card.inside.adapters.settings import AdapterSettings
from card.inside.adapters.setup import make_proposer
from card.links.in_process import InlineLink
from card.machine.threads import integer_pass_threads
from tests.decoding import drafter_for, toy_draft, toy_target
from tests.examples import settings
from tests.inside.adapters.drafters import VOCAB_SIZE, decode_all, greedy_of, plain, toy_proposer
from tests.inside.adapters.engine import FakeEngine, Turmoil
from tests.pair import Pair
from tests.toy import TableModel

TARGET = toy_target()
FOLLOW = greedy_of(TARGET)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8], [7], [3, 1, 4, 1, 5, 9]]
CALM = Turmoil()
STEP_S, PASS_S = 0.01, 0.001  # of the engine and of the drafter, by the clock of these tests


class Timed(InlineLink):
    """A link whose passes take time by a clock of its own."""

    def __init__(self, worker: DrafterWorker, pass_s: float = PASS_S) -> None:
        super().__init__(worker)
        self.now = 0.0
        self.num_passes = 0
        self._pass_s = pass_s

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        self.num_passes += num_passes
        self.now += num_passes * self._pass_s
        return super().draft(num_passes, end)


class Engine:
    """Hands rows over to the proposer, and takes time for its own steps."""

    def __init__(self, proposer: ChainProposer, link: Timed) -> None:
        self._proposer, self._link = proposer, link

    def propose(self, *given: Any) -> list[list[int]]:
        self._link.now += STEP_S
        return self._proposer.propose(*given)


def decode(
    draft: TableModel,
    *,
    turmoil: Turmoil = CALM,
    seed: int = 0,
    num_rows: int = 3,
    num_new: int = 40,
    pass_s: float = PASS_S,
) -> tuple[FakeEngine, Timed]:
    """Decode all prompts with a drafter that takes turns, and check each text against plain decoding."""
    link = Timed(drafter_for(draft), pass_s)
    proposer = toy_proposer(None, link=link, clock=lambda: link.now, writers=(), row_cost=0.05)
    engine = FakeEngine(FOLLOW, Engine(proposer, link), num_rows=num_rows, max_len=128, seed=seed, turmoil=turmoil)
    decode_all(engine, FOLLOW, PROMPTS, num_new)
    return engine, link


chances = st.sampled_from([0.0, 0.1, 0.4])


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    agreement=st.sampled_from([0.0, 0.6, 1.0]),
    turmoil=st.builds(Turmoil, preempt=chances, swap=chances, trim=chances, chunk=chances, cancel=chances),
    num_rows=st.integers(1, 4),
)
def test_the_text_is_that_of_plain_decoding_under_any_scheduling(
    seed: int, agreement: float, turmoil: Turmoil, num_rows: int
):
    decode(toy_draft(TARGET, agreement), turmoil=turmoil, seed=seed, num_rows=num_rows)


def test_candidates_are_there_in_the_very_step_that_they_are_for():
    """Beside the engine they come a step later at best; in turns nearly all steps verify full chains."""
    engine, _ = decode(toy_draft(TARGET, 1.0), num_rows=len(PROMPTS))
    assert engine.num_steps <= 1 + 40 / 5  # chains of five and one token more; the first step has none
    assert engine.num_accepted > 0.85 * engine.num_proposed


def test_a_draft_model_that_is_no_use_rests():
    useless = TableModel(99, VOCAB_SIZE, spread=9.0)
    engine, link = decode(useless, num_rows=1, num_new=100, pass_s=STEP_S / 4)  # a good one would be worth that
    assert 0 < link.num_passes < 0.2 * engine.num_steps


def test_passes_that_take_longer_than_they_save_are_not_made():
    cheap, dear = (decode(toy_draft(TARGET, 0.7), num_rows=1, pass_s=pass_s) for pass_s in (PASS_S, 20 * STEP_S))
    assert dear[1].num_passes < 0.3 * cheap[1].num_passes


def test_a_drafter_that_fails_is_heard_of_no_more_and_decoding_goes_on():
    class Failing(DrafterWorker):
        def step(self) -> list[DrafterMessage]:
            raise RuntimeError("out of memory")

    worker = drafter_for(toy_draft(TARGET, 1.0))
    worker.__class__ = Failing
    link = Timed(worker)
    proposer = toy_proposer(None, link=link, clock=lambda: link.now, writers=())
    engine = FakeEngine(FOLLOW, Engine(proposer, link), num_rows=2, max_len=64, seed=0, turmoil=CALM)
    job = engine.add([3, 1, 4], 30)
    engine.run()
    assert job.token_ids == plain(FOLLOW, [3, 1, 4], 30)
    assert link.status.state == "down"
    assert link.num_passes == 1, "nobody asks a drafter that is down"


def test_the_process_of_the_engine_holds_the_draft_model_and_proposes_what_it_says(pair: Pair):
    settings = AdapterSettings(draft=pair.draft, schedule="turns", row_cost=0.0, writers=("beam",))
    proposer = make_proposer(settings, vocab_size=512, max_model_len=64, num_speculative_tokens=3, tokenizer=None)
    try:
        assert isinstance(proposer.link, InlineLink)
        (chain,) = proposer.propose([[7]], [4], np.array([[1, 2, 3, 7]], np.int32))
        assert len(chain) == 3
        assert proposer.propose([[]], [4], np.array([[1, 2, 3, 7]], np.int32)) == [[]]
    finally:
        proposer.close()


def test_threads_of_torch_are_left_as_the_engine_has_set_them(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """vLLM binds them to cores and has each call to change them print a warning."""
    settings = AdapterSettings(draft=pair.draft, schedule="turns", writers=("beam",), draft_threads=2)
    proposer = make_proposer(settings, vocab_size=512, max_model_len=64, num_speculative_tokens=3, tokenizer=None)
    seen: list[int] = []
    assert isinstance(proposer.link, InlineLink)
    draft = proposer.link.worker.step
    monkeypatch.setattr(proposer.link.worker, "step", lambda: (seen.append(integer_pass_threads()), draft())[1])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("nobody may"))
    before = integer_pass_threads()
    proposer.propose([[7]], [4], np.array([[1, 2, 3, 7]], np.int32))
    assert set(seen) == {2}
    assert integer_pass_threads() == before
    proposer.close()


@pytest.mark.parametrize(("schedule", "width"), [("beside", 4), ("turns", 1)])
def test_a_beam_in_turns_is_a_single_path_unless_said_otherwise(schedule: str, width: int):
    given = {"draft": "x", "schedule": schedule}
    assert AdapterSettings.from_mapping(given).draft_settings(4).beam_width == width
    assert AdapterSettings.from_mapping({**given, "beam_width": 3}).draft_settings(4).beam_width == 3
