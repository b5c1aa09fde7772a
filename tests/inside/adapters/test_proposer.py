"""Whatever an engine does to its rows, and whatever becomes of the drafter: the text stays, and only speed is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from card.config import EngineSettings
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.local.protocol import LocalWriter, Observation, WriterSequence
from card.drafting.messages import DrafterMessage, Layer, Open, TargetMessage
from card.inside.adapters.drafted_text import DraftingFacts, judged
from card.inside.adapters.proposer import ChainProposer
from card.inside.adapters.tracking import Followed, RowTracker
from card.tree.nodes import NewNodes, Nodes
from tests.decoding import drafter_for, toy_draft, toy_target
from tests.examples import settings
from tests.inside.adapters.drafters import VOCAB_SIZE, DirectLink, decode_all, greedy_of, plain, toy_proposer
from tests.inside.adapters.engine import FakeEngine, Turmoil
from tests.toy import TableModel
from tests.unreliable_link import FakeLink, Faults

TARGET = toy_target()
DRAFT = toy_draft(TARGET, 0.95)
FOLLOW = greedy_of(TARGET)
CALM = Turmoil()
STORM = Turmoil(preempt=0.2, resume=0.5, swap=0.3, trim=0.2, chunk=0.3, cancel=0.03)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8], [3, 1, 4, 1, 5], [7], [3, 1, 4, 1, 5, 9]]


def decode(
    proposer: Any, *, turmoil: Turmoil = CALM, seed: int = 0, num_rows: int = 4, num_new: int = 40
) -> FakeEngine:
    """Decode all prompts and check each text against plain decoding."""
    engine = FakeEngine(FOLLOW, proposer, num_rows=num_rows, max_len=128, seed=seed, turmoil=turmoil)
    decode_all(engine, FOLLOW, PROMPTS, num_new)
    return engine


chances = st.sampled_from([0.0, 0.1, 0.4])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    turmoil=st.builds(
        Turmoil, preempt=chances, swap=chances, trim=chances, chunk=chances, cancel=st.sampled_from([0.0, 0.05])
    ),
    faults=st.builds(
        Faults,
        seed=st.integers(0, 99),
        drop=chances,
        duplicate=chances,
        max_delay=st.integers(0, 3),
        kill=st.sampled_from([0.0, 0.1]),
    ),
    num_rows=st.integers(1, 5),
    max_parked=st.integers(0, 4),
)
def test_the_text_is_that_of_plain_decoding_under_any_scheduling_and_any_faults(
    seed: int, turmoil: Turmoil, faults: Faults, num_rows: int, max_parked: int
):
    decode(toy_proposer(DRAFT, faults, max_parked=max_parked), turmoil=turmoil, seed=seed, num_rows=num_rows)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_rows_that_are_taken_for_one_another_cost_speed_only(seed: int):
    """The tracker gives every row the text of any row at all: chains are then of other requests."""

    class Confused(RowTracker[Any]):
        def follow(self, lengths: Sequence[int], tokens: Any) -> Followed[Any]:
            step = super().follow(lengths, tokens)
            rng.shuffle(step.texts)
            return step

    rng = random.Random(seed)
    proposer = toy_proposer(DRAFT)
    proposer._tracker = Confused(proposer.begin, max_parked=64)
    decode(proposer, turmoil=STORM, seed=seed)


def test_a_good_drafter_makes_steps_few():
    with_drafter = decode(toy_proposer(TARGET_AS_DRAFT, Faults(max_passes=8)))
    alone = decode(toy_proposer(None, writers=()))
    assert alone.num_proposed == 0
    assert with_drafter.num_steps < 0.5 * alone.num_steps
    assert with_drafter.num_accepted > 0.6 * with_drafter.num_proposed


TARGET_AS_DRAFT = toy_draft(TARGET, 1.0)


def test_requests_are_found_again_after_preemption_and_their_candidates_go_on():
    proposer = toy_proposer(TARGET_AS_DRAFT)
    turmoil = Turmoil(preempt=0.2, swap=0.5)
    engine = decode(proposer, turmoil=turmoil, num_new=100)
    assert engine.num_preempted > 5
    assert proposer.figures.requests_begun == len(PROMPTS)  # the equal prompts included: two rows are two requests
    assert 0 < proposer.figures.requests_resumed <= engine.num_preempted  # some were back before they were missed
    assert engine.num_accepted > 0.6 * engine.num_proposed


def test_no_request_stays_open_in_the_drafter_once_it_has_no_row():
    proposer = toy_proposer(DRAFT, Faults(max_passes=8))
    decode(proposer, turmoil=Turmoil(preempt=0.1))
    proposer.propose([], [], np.zeros((1, 8), np.int32))
    link = proposer.link
    assert isinstance(link, DirectLink)
    link.link.draft(1)
    assert not link.link.worker.drafting
    assert proposer._by_drafter_id == {}


class Lying(FakeLink):
    """Says about every request what no drafter can know: a tree of random tokens, some of them no tokens at all."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda: None, Faults())  # type: ignore[arg-type,return-value]
        self._lies = random.Random(seed)
        self._said: list[DrafterMessage] = []
        self.num_rejected = 0

    def send(self, message: TargetMessage) -> None:
        lies = self._lies
        if isinstance(message, Open):
            num = lies.randint(1, 6)
            self._said.append(
                Layer(
                    request_id=message.request_id + lies.choice([0, 0, 0, 7]),
                    seq=lies.choice([0, 0, 3]),
                    epoch=0,
                    is_reset=lies.random() < 0.9,
                    root_id=0,
                    root_position=len(message.token_ids) - lies.choice([1, 1, 1, 0, 5]),
                    known_len=len(message.token_ids),
                    nodes=NewNodes(
                        ids=tuple(range(1, num + 1)),
                        parents=tuple(range(num)),
                        tokens=tuple(lies.randint(-1, VOCAB_SIZE + (lies.random() < 0.2)) for _ in range(num)),
                        logprobs=tuple(lies.choice([0.0, -0.1, float("nan")]) for _ in range(num)),
                    ),
                    num_passes=1,
                    busy_s=0.0,
                    num_reused=0,
                    num_dropped=0,
                    num_rolled_back=0,
                )
            )

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        return []

    def receive(self) -> list[DrafterMessage]:
        said, self._said = self._said, []
        return said

    def reject(self, reason: str) -> None:
        self.num_rejected += 1


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_a_lying_drafter_changes_no_text_and_gets_no_token_through_that_the_target_lacks(seed: int):
    proposer = toy_proposer(None)
    link = Lying(seed)
    proposer.link = DirectLink(link)
    proposer._drafting = DraftingFacts(draft=proposer_draft(), max_model_len=128, vocab_size=VOCAB_SIZE)

    class Checked:
        def propose(self, *given: Any) -> list[list[int]]:
            chains = proposer.propose(*given)
            assert all(0 <= token < VOCAB_SIZE for chain in chains for token in chain)
            assert all(len(chain) <= 5 for chain in chains)
            return chains

    decode(Checked(), turmoil=STORM, seed=seed)
    assert link.num_rejected == proposer.figures.rejections


def proposer_draft() -> Any:
    drafting = toy_proposer(DRAFT)._drafting
    assert drafting is not None
    return drafting.draft


def test_a_drafter_that_never_answers_costs_nothing_but_its_candidates():
    silent = toy_proposer(DRAFT, Faults(drop=1.0), writers=())
    engine = decode(silent)
    assert engine.num_proposed == 0


def test_a_text_that_outgrows_its_room_is_opened_anew_and_drafted_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("card.inside.adapters.drafted_text._FIRST_ROOM", 8)
    proposer = toy_proposer(TARGET_AS_DRAFT)
    engine = decode(proposer, num_new=100)
    assert engine.num_accepted > 300
    assert proposer.figures.requests_begun == len(PROMPTS)


def test_texts_with_tokens_that_the_target_lacks_are_followed_but_not_continued():
    proposer = toy_proposer(DRAFT)
    tokens = np.array([[1, 50, 3, 4, 0, 0], [-1, 2, 3, 4, 0, 0]], np.int32)
    for length in (4, 5, 6):
        tokens[:, length - 1] = 1
        assert proposer.propose([[1], [1]], [length] * 2, tokens) == [[], []]
    assert proposer.figures.requests_begun == 2


class Noting(DirectLink):
    """Notes the texts that the drafter is asked to draft for."""

    def __init__(self, link: FakeLink) -> None:
        super().__init__(link)
        self.lengths: list[int] = []

    def send(self, message: TargetMessage) -> None:
        if isinstance(message, Open):
            self.lengths.append(len(message.token_ids))
        super().send(message)


@pytest.mark.parametrize(
    "draft",
    [
        TableModel(1, vocab_size=6, order=2, num_tree_rows=512),  # each text comes to a token above 5
        TableModel(1, vocab_size=12, order=2, max_model_len=30, num_tree_rows=512),
    ],
    ids=["lacks tokens", "short context"],
)
def test_a_text_that_the_drafter_declines_is_never_opened_again(draft: TableModel):
    link = Noting(FakeLink(lambda: drafter_for(draft), Faults(max_passes=8)))
    proposer = toy_proposer(None, link=link, writers=())
    decode(proposer, num_new=60, turmoil=Turmoil(preempt=0.1), seed=3)
    assert proposer.figures.declined == len(PROMPTS)
    assert max(link.lengths) < 45, "after a preemption too"
    assert (proposer.figures.rejections, str(link.status)) == (0, "up")
    assert not link.link.worker.drafting


def test_nothing_is_proposed_beyond_the_longest_text():
    proposer = toy_proposer(TARGET_AS_DRAFT, max_len=10, row_cost=0.0)
    text = plain(FOLLOW, [3, 1, 4], 7)
    tokens = np.array([text], np.int32)
    for length in range(4, 11):
        (chain,) = proposer.propose([[text[length - 1]]], [length], tokens)
        assert len(chain) <= 10 - length


def test_closing_ends_writers_and_drafter_and_can_be_done_twice():
    proposer = toy_proposer(DRAFT)
    proposer.propose([[1]], [3], np.array([[2, 3, 1]], np.int32))
    proposer.close()
    proposer.close()
    assert isinstance(proposer.link, DirectLink)
    assert proposer.link.is_closed


def chain_of(*tokens: int) -> Nodes:
    return replace(Nodes.chain(tokens, (0.0,) * len(tokens)), writers=(1,) * len(tokens))


@pytest.mark.parametrize(
    ("new_ids", "known", "right"),
    [
        ([5, 6, 7, 1], 3, 3),  # all right, and one more
        ([5, 6, 1], 3, 2),  # the last one was wrong
        ([1], 3, 0),
        ([5], 1, 1),  # only the first one was verified, or none
        ([5, 6, 7], 3, 3),
        ([], 0, 0),
    ],
)
def test_committed_tokens_judge_the_chain_as_far_as_they_tell(new_ids: list[int], known: int, right: int):
    told, num_right = judged(chain_of(5, 6, 7), new_ids)
    assert (len(told), num_right) == (known, right)


def test_a_proposer_without_rows_does_nothing():
    proposer: ChainProposer = toy_proposer(DRAFT)
    assert proposer.propose([], [], np.zeros((4, 8), np.int32)) == []


def test_a_model_that_agrees_with_nothing_is_soon_not_worth_a_row():
    proposer = toy_proposer(TableModel(99, VOCAB_SIZE, spread=9.0), writers=(), row_cost=0.3)
    engine = decode(proposer, num_new=100, num_rows=1)
    assert engine.num_proposed < 0.5 * engine.num_steps


def test_writers_are_asked_for_ever_fewer_candidates_where_none_is_worth_a_row(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    class Hopeless(WriterSequence):
        def propose(self, best_path: Sequence[int], budget: int) -> Nodes:
            asked.append(budget)
            return Nodes((1,), (-1,), (-3.0,))

        def observe(self, seen: Observation) -> None:
            pass

    proposer = toy_proposer(None, writers=(), row_cost=0.9)
    monkeypatch.setattr(LocalWriter, "open", lambda *_: Hopeless())
    proposer._writers = {"hopeless": LocalWriter(EngineSettings(), VOCAB_SIZE)}
    decode(proposer, num_rows=1)
    assert asked[:7] == [5, 4, 3, 2, 1, 1, 1]


def test_rows_take_turns_where_there_is_no_time_for_all_writers_of_all_rows():
    proposer = toy_proposer(
        None, writers=("suffix",), row_cost=0.0, local_writers_s=0.0005
    )  # the clock says 1 ms a look
    text = [1, 2, 3, 4, 1, 2]
    tokens = np.array([text, text[::-1], [5, 6, 5, 6, 5, 6]], np.int32)
    for row in tokens:
        row[4:] = row[:2]
    served = [proposer.propose([[int(row[-1])] for row in tokens], [6] * 3, tokens)]
    for length in (7, 8):
        tokens = np.concatenate([tokens, tokens[:, length - 4 : length - 3]], axis=1)
        served.append(proposer.propose([[int(row[-1])] for row in tokens], [length] * 3, tokens))
    assert [[bool(chain) for chain in step].count(True) for step in served] == [1, 1, 1]
    assert [step.index(max(step, key=len)) for step in served] == [0, 1, 2]
