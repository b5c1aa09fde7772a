"""A turn of a drafter ends by itself: for each request where its best path is not likely enough any more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.drafting.beam import BeamWriter
from card.drafting.drafter import DrafterWorker
from card.drafting.drafter_pass import NO_END, Calibration, TurnEnd
from card.drafting.messages import Open
from card.links.in_process import InlineLink
from tests.drafts import LayersWriter, draft_spec
from tests.examples import settings
from tests.toy import TableModel

V = 12
MANY = 40  # layers, more than any floor leaves


def link_with(seed: int, num_requests: int, *, width: int = 1, spread: float = 3.0) -> InlineLink:
    """Return a drafter in turns with so many texts, its model sure of some tokens and unsure of others."""
    ticks = itertools.count()
    writer = BeamWriter(TableModel(seed, V, 3, spread=spread, num_tree_rows=512))
    link = InlineLink(DrafterWorker(writer, clock=lambda: float(next(ticks))))
    for request_id in range(num_requests):
        link.send(Open(request_id, (3, 1, 4 + request_id), draft_spec(beam_width=width, lead=MANY)))
    return link


def best_chances(link: InlineLink, level: float = 1.0) -> Mapping[int, list[float]]:
    """Return for each request the chance of its best path at each depth, from the root on."""
    chances = {}
    for request_id, drafting in link.worker.drafting.items():
        scores = drafting.sequence.cache.query(10_000, "tree").path_logprobs
        depths = drafting.sequence.cache.query(10_000, "tree").depths
        best: dict[int, float] = {}
        for depth, score in zip(depths, scores, strict=True):
            best[depth] = max(best.get(depth, -math.inf), score)
        chances[request_id] = [1.0, *(math.exp(best[depth]) * level**depth for depth in sorted(best))]
    return chances


@given(
    seed=st.integers(0, 999),
    num_requests=st.integers(1, 4),
    floor=st.floats(0.01, 1.0),
    level=st.floats(0.5, 1.0),
    num_passes=st.integers(1, 12),
)
@settings(max_examples=30)
def test_no_pass_is_made_for_a_request_once_its_best_path_is_less_likely_than_the_floor(
    seed: int, num_requests: int, floor: float, level: float, num_passes: int
) -> None:
    link = link_with(seed, num_requests)
    passes = link.draft(num_passes, TurnEnd((floor,), calibration=Calibration(level)))
    depths = []
    for *above, last in best_chances(link, level).values():
        depths.append(len(above))
        assert all(chance >= floor for chance in above), "no layer is made below what is unlikely"
        assert last < floor or len(above) == num_passes, "each request has its own end"
    assert len(passes) == max(depths)
    assert [num for num, _ in passes] == [sum(depth > idx for depth in depths) for idx in range(len(passes))]


@given(seed=st.integers(0, 999), floor=st.floats(0.01, 1.0), width=st.integers(2, 4))
@settings(max_examples=30)
def test_a_wide_tree_ends_by_its_best_path(seed: int, floor: float, width: int) -> None:
    link = link_with(seed, 1, width=width)
    link.draft(8, TurnEnd((floor,)))
    (chances,) = best_chances(link).values()
    assert all(chance >= floor for chance in chances[:-1])
    assert chances[-1] < floor or len(chances) == 1 + 8


@given(seed=st.integers(0, 999), num_requests=st.integers(1, 4), num_passes=st.integers(0, 12))
@settings(max_examples=30)
def test_without_a_floor_as_many_passes_are_made_as_told(seed: int, num_requests: int, num_passes: int) -> None:
    link = link_with(seed, num_requests, spread=1.0)
    assert [num for num, _ in link.draft(num_passes)] == [num_requests] * num_passes
    assert all(len(chances) == 1 + num_passes for chances in best_chances(link).values())


def test_a_drafter_that_cannot_be_trusted_ends_its_turn_sooner() -> None:
    def depth(level: float) -> int:
        return sum(
            len(link_with(seed, 1).draft(MANY, TurnEnd((0.2,), calibration=Calibration(level)))) for seed in range(10)
        )

    depths = [depth(level) for level in (1.0, 0.8, 0.5)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1] > 0


@given(seed=st.integers(0, 999), resting=st.frozensets(st.integers(0, 4)), num_passes=st.integers(1, 5))
@settings(max_examples=30)
def test_requests_that_rest_get_nothing_and_the_others_what_they_would_get_anyway(
    seed: int, resting: frozenset[int], num_passes: int
) -> None:
    link, all_drafted = (link_with(seed, 5) for _ in range(2))
    passes = link.draft(num_passes, TurnEnd(resting=resting))
    all_drafted.draft(num_passes)
    expected = best_chances(all_drafted)
    for request_id, chances in best_chances(link).items():
        assert chances == ([1.0] if request_id in resting else expected[request_id])
    assert {num for num, _ in passes} <= {5 - len(resting)}
    assert bool(passes) == (len(resting) < 5)


def test_a_layer_is_made_only_if_all_that_it_is_made_for_are_together_likely_enough() -> None:
    for num_requests in (1, 2, 4):
        wanted = 1.5 - 0.2 * 1.5  # of a fresh text each is worth 0.8 above the floor
        passes = link_with(3, num_requests).draft(1, TurnEnd((0.2,), layer=wanted))
        assert bool(passes) == (num_requests >= 2)


@given(seed=st.integers(0, 999), num_requests=st.integers(1, 4), floor=st.floats(0.0, 0.6), layer=st.floats(0.0, 1.0))
@settings(max_examples=40)
def test_the_turn_ends_with_the_first_layer_that_is_not_worth_it(
    seed: int, num_requests: int, floor: float, layer: float
) -> None:
    link = link_with(seed, num_requests)
    num_passes = len(link.draft(MANY // 2, TurnEnd((floor,), layer)))
    found = list(best_chances(link).values())

    def worth(depth: int) -> float:
        ends = [chances[depth] for chances in found if len(chances) > depth]
        return sum(end - floor for end in ends if end >= floor)

    assert all(worth(depth) >= layer - 1e-9 for depth in range(num_passes))
    assert num_passes == MANY // 2 or worth(num_passes) < max(layer, 1e-9)


def test_each_turn_has_its_own_end() -> None:
    link = link_with(3, 1)
    assert link.draft(4, TurnEnd(resting=frozenset({0}))) == []
    assert len(link.draft(4)) == 4
    assert link.draft(4, TurnEnd((1.0,))) == [], "nothing is certain so deep"
    assert len(link.draft(4, NO_END)) == 4


def test_a_turn_without_any_request_is_over_at_once() -> None:
    assert link_with(0, 0).draft(5) == []


def test_a_drafter_of_several_layers_a_pass_ends_by_where_its_path_has_got_to() -> None:
    ticks = itertools.count()
    writer = LayersWriter(TableModel(4, V, 3, spread=3.0))
    link = InlineLink(DrafterWorker(writer, clock=lambda: float(next(ticks))))
    assert link.layers_per_pass == LayersWriter.layers_per_pass
    link.send(Open(0, (3, 1, 4), draft_spec(beam_width=1, lead=MANY)))
    link.draft(5, TurnEnd((0.3,)))
    (chances,) = best_chances(link).values()
    begun = chances[: -1 : LayersWriter.layers_per_pass]
    assert all(chance >= 0.3 for chance in begun)
    assert chances[-1] < 0.3


@pytest.mark.parametrize(
    ("depth", "logprob", "level", "chance"), [(0, 0.0, 0.5, 1.0), (2, 0.1, 1.0, 1.0), (3, -0.5, 2.0, 1.0)]
)
def test_no_path_is_likelier_than_certain(depth: int, logprob: float, level: float, chance: float) -> None:
    assert Calibration(level).chance(depth, logprob) == chance


@given(seed=st.integers(0, 999), floors=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5))
@settings(max_examples=40)
def test_each_depth_has_a_floor_of_its_own_and_the_last_one_holds_for_all_that_is_deeper(
    seed: int, floors: list[float]
) -> None:
    link = link_with(seed, 1)
    num_passes = len(link.draft(MANY // 2, TurnEnd((0.0, *floors))))
    (chances,) = best_chances(link).values()
    floor_of = [0.0, *(floors[min(depth, len(floors)) - 1] for depth in range(1, len(chances)))]
    assert all(chance >= floor for chance, floor in zip(chances[:num_passes], floor_of, strict=False))
    assert num_passes == MANY // 2 or chances[num_passes] < floor_of[num_passes]
