"""Virtual time: messages arrive when they should, and nobody acts before what could still reach it is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from card.drafting.beam import BeamWriter
from card.drafting.messages import Close, Layer, Open
from card.tools.planner.replay import PassSize, ReplayedModel
from card.tools.planner.replayed_texts import ReplayedTexts
from card.tools.planner.virtual_time import VirtualClock, VirtualDrafter, VirtualLink
from tests.drafts import draft_spec
from tests.examples import settings
from tests.tools.planner.making import toy_recording
from tests.tools.planner.sharing import Seat, SharedDrafter, SharedWorld

TEXTS = ReplayedTexts(toy_recording())
PASS_S, DELAY_S = 2.0, 5.0
SPEC = draft_spec(temperature=0.0, beam_width=1, branch=1, lead=4)


def writer(clock: VirtualClock) -> BeamWriter:
    """Return the writer of a drafter whose passes take PASS_S and nothing else."""

    def on_pass(_: PassSize) -> None:
        clock.advance(PASS_S)

    model = ReplayedModel(
        TEXTS, "draft", max_model_len=256, num_tree_rows=64, on_pass=on_pass, on_keep=lambda _: clock.advance(0.0)
    )
    return BeamWriter(model)


def drafter(delay_s: float = DELAY_S) -> VirtualDrafter:
    clock = VirtualClock()
    return VirtualDrafter(writer(clock), clock, delay_s=delay_s)


def drafter_of_two() -> SharedDrafter:
    clock = VirtualClock()
    return SharedDrafter(writer(clock), clock, num_targets=2, delay_s=0.5)


def opened(text_idx: int = 0) -> Open:
    return Open(text_idx, TEXTS.prompts[text_idx], SPEC)


def test_layers_arrive_one_pass_and_two_ways_after_the_request():
    clock = VirtualClock()
    link = VirtualLink(drafter(), clock)
    link.send(opened())
    arrivals: list[float] = []
    while clock.now < 30.0:
        for message in link.receive():
            assert isinstance(message, Layer)
            arrivals.append(clock.now)
        clock.advance(0.5)
    # The answer to the request, then four layers until the lead is reached.
    assert arrivals == [2 * DELAY_S, *(2 * DELAY_S + PASS_S * num for num in (1, 2, 3, 4))]


def test_a_wait_ends_with_the_first_message_or_with_the_time_allowed():
    clock = VirtualClock()
    link = VirtualLink(drafter(), clock)
    link.send(opened())
    link.wait(3.0)
    assert clock.now == 3.0
    assert link.receive() == []
    link.wait(60.0)
    assert clock.now == 2 * DELAY_S
    assert len(link.receive()) == 1
    link.wait(60.0)
    assert clock.now == 2 * DELAY_S + PASS_S
    clock.advance(100.0)
    link.receive()
    link.wait(0.25)
    assert clock.now == 2 * DELAY_S + PASS_S + 100.25  # everything was said


def test_messages_take_of_the_targets_time():
    clock = VirtualClock()
    link = VirtualLink(drafter(delay_s=0.0), clock, message_s=0.125)
    link.send(opened())
    assert clock.now == 0.125
    clock.advance(50.0)
    assert clock.now + 5 * 0.125 == 50.125 + 0.125 * len(link.receive())
    assert clock.now == 50.75


def test_a_drafter_that_is_told_in_the_middle_of_a_pass_hears_it_afterwards():
    clock = VirtualClock()
    served = drafter(delay_s=0.0)
    link = VirtualLink(served, clock)
    link.send(opened())
    clock.advance(1.0)
    link.receive()  # the first pass has begun
    link.send(Close(0))
    clock.advance(20.0)
    assert len(link.receive()) == 1  # the layer of that pass, and no more
    assert not served.worker.drafting


def test_a_message_is_not_heard_before_it_arrives():
    clock = VirtualClock()
    link = VirtualLink(drafter(), clock)
    link.send(opened())
    clock.advance(4.5)
    link.send(Close(0))  # arrives at 9.5, in the third pass, which began at 9
    clock.advance(60.0)
    assert len(link.receive()) == 1 + 3


@given(steps=st.lists(st.tuples(st.integers(0, 1), st.floats(0.1, 4.0)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_of_two_targets_each_hears_what_a_world_of_small_steps_would_let_it_hear(steps):
    """Two targets look at their messages at given moments; a slow world lets all time pass in tiny steps."""
    looks = [[wait for idx, wait in steps if idx == target] for target in (0, 1)]
    clocks = [VirtualClock(), VirtualClock()]
    world = SharedWorld(drafter_of_two())
    heard: list[list[tuple[float, int]]] = [[], []]

    def job(idx: int) -> None:
        link = VirtualLink(Seat(world, idx), clocks[idx])
        link.send(opened(idx))
        for wait in looks[idx]:
            clocks[idx].advance(wait)
            heard[idx].append((clocks[idx].now, len(link.receive())))

    world.run(clocks, [lambda: job(0), lambda: job(1)])
    assert heard == [slowly_heard(looks, 0), slowly_heard(looks, 1)]


def slowly_heard(looks: list[list[float]], target_idx: int) -> list[tuple[float, int]]:
    """Return the same from a drafter that nobody disturbs: both targets speak at the beginning only."""
    served = drafter_of_two()
    for idx in (0, 1):
        served.send(idx, 0.0, opened(idx))
    while served.next_at() is not None and served.next_at() < 200.0:
        served.act()
    now, found = 0.0, []
    for wait in looks[target_idx]:
        now += wait
        found.append((now, len(served.take(target_idx, now))))
    return found
