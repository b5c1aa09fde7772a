"""Two drafters of which one is spoken to: orders and messages reach it under the numbers that it knows requests by."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from card.config import Schedule
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import Close, DrafterMessage, Layer, Open, Ready, TargetMessage
from card.engine.engine import Engine
from card.engine.target import TargetWorker
from card.links.link import DrafterLink, LinkStatus
from card.links.switch import SwitchLink
from tests.decoding import fake, inline, make_request, plain, toy_draft, toy_target
from tests.drafts import draft_spec
from tests.examples import settings
from tests.reaching_in import policy_of


class Noting(DrafterLink):
    """A link that notes what it is told, and says nothing."""

    def __init__(self, *, takes_turns: bool = False) -> None:
        super().__init__()
        self.runs_by_itself = not takes_turns
        self.told: list[TargetMessage] = []
        self.orders: list[tuple[int, TurnEnd]] = []
        self.num_receives = 0

    def send(self, message: TargetMessage) -> None:
        self.told.append(message)

    def receive(self) -> list[DrafterMessage]:
        self.num_receives += 1
        return []

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        self.orders.append((num_passes, end))
        return [(1, 0.5)] * num_passes


def opening(request_id: int) -> Open:
    return Open(request_id, (3, 1, 4), draft_spec(beam_width=1))


@given(
    request_ids=st.sets(st.integers(0, 10**9), min_size=2, max_size=6),
    switches=st.lists(st.sampled_from(["beside", "turns", "off"]), max_size=8),
)
@settings(max_examples=40)
def test_an_order_names_requests_as_the_drafter_of_the_present_term_knows_them(
    request_ids: set[int], switches: list[Schedule]
) -> None:
    turns = Noting(takes_turns=True)
    link = SwitchLink(Noting(), turns)
    for schedule in (*switches, "turns"):
        link.use(schedule)
    turns.told.clear()
    ordered = sorted(request_ids)
    for request_id in ordered:
        link.send(opening(request_id))
    known_as = [message.request_id for message in turns.told if isinstance(message, Open)]
    resting = frozenset(ordered[::2])
    assert link.draft(2, TurnEnd(0.3, 0.1, 0.9, resting)) == [(1, 0.5)] * 2
    assert turns.orders == [(2, TurnEnd(0.3, 0.1, 0.9, frozenset(known_as[::2])))]


def test_requests_that_rest_get_nothing_from_the_drafter_behind_a_switch_and_others_do() -> None:
    target = toy_target()
    link = SwitchLink(Noting(), inline(toy_draft(target, 1.0)))
    link.use("beside")
    link.use("turns")
    for request_id in (7, 8, 9):
        link.send(opening(request_id))
    assert [num for num, _ in link.draft(2, TurnEnd(resting=frozenset({8})))] == [2, 2]
    drafted = {one.request_id for one in link.receive() if isinstance(one, Layer) and one.nodes.ids}
    assert drafted == {7, 9}


def test_a_switch_closes_what_was_open_and_asks_for_everything_anew() -> None:
    beside, turns = Noting(), Noting(takes_turns=True)
    link = SwitchLink(beside, turns)
    for request_id in (1, 2, 3):
        link.send(opening(request_id))
    link.send(Close(2))
    link.receive()
    link.use("turns")
    opened = [one.request_id for one in beside.told if isinstance(one, Open)]
    assert [one.request_id for one in beside.told if isinstance(one, Close)][1:] == [opened[0], opened[2]]
    assert [type(message) for message in link.receive()] == [Ready]
    assert turns.told == []
    link.use("off")
    assert link.receive() == [], "to rest leaves the present drafter in place"
    assert link.own_schedule == "turns"


def test_texts_are_right_when_every_round_has_another_drafter() -> None:
    target = toy_target(2)
    draft = toy_draft(target, 0.8)
    beside = fake(draft)
    beside.runs_by_itself = True
    engine = Engine(TargetWorker(target, clock=time.perf_counter), SwitchLink(beside, inline(draft)))
    schedules = itertools.cycle(("beside", "turns", "turns", "off", "beside", "off", "turns"))
    engine.add(engine.check(request := make_request(0)))
    token_ids: list[int] = []
    while engine.has_work:
        policy_of(engine).schedule = next(schedules)
        token_ids += [token_id for update in engine.step() for token_id in update.token_ids]
    assert token_ids == plain(toy_target(2), params=request.params)[0]


def test_the_drafter_that_rests_is_looked_after_now_and_then_and_the_present_one_always() -> None:
    beside, turns, seconds = Noting(), Noting(takes_turns=True), itertools.count(step=0.01)
    link = SwitchLink(beside, turns, clock=lambda: next(seconds))
    for _ in range(160):
        link.receive()
    assert beside.num_receives == 160
    assert 5 <= turns.num_receives <= 20


def test_the_schedules_that_are_available_are_those_whose_drafter_is_up() -> None:
    beside, turns = Noting(), Noting(takes_turns=True)
    link = SwitchLink(beside, turns)
    assert link.available == {"beside", "turns", "off"}
    beside.reject("it lies")
    assert link.available == {"turns", "off"}
    assert link.status == LinkStatus("down", "it lies")
