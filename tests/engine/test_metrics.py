"""Counters and derived figures, against examples worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from msgspec.structs import replace

from card.engine.metrics import RequestStats
from card.tree.nodes import NO_NODES, Nodes

# 21 tokens: one from the prompt's pass, then 8 verifications that committed 12 accepted tokens and 8 of the target.
EXAMPLE = RequestStats(
    num_prompt_tokens=10,
    num_new_tokens=21,
    prefill_s=0.5,
    wall_s=2.5,
    target_passes=8,
    target_busy_s=1.5,
    waited_s=0.1,
    verified_tokens=30,
    accepted_tokens=12,
    hits=4,
    late_hits=2,
    misses=2,
    drafter_passes=60,
    drafter_busy_s=1.5,
)
DERIVED = {
    "decode_s": 2.0,
    "decode_tokens_per_s": 10.0,  # 20 tokens after the first one, in 2 s
    "mean_acceptance_length": 2.5,
    "acceptance_rate": 0.4,
    "hit_rate": 0.75,
    "drafter_layers_per_s": 40.0,
    "ceiling_share": 0.12,  # 12 accepted tokens in 2.5 s, of 40 layers/s
    "target_busy_share": 0.75,
    "round_overhead_ms": 50.0,  # 2 - 1.5 - 0.1 s over 8 rounds
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_figures_are_those_worked_out_by_hand(name: str) -> None:
    assert getattr(EXAMPLE, name) == pytest.approx(DERIVED[name])


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("num_new_tokens", [0, 1])
def test_figures_of_a_request_that_did_nothing_are_zero(name: str, num_new_tokens: int) -> None:
    stats = RequestStats(num_new_tokens=num_new_tokens)
    assert getattr(stats, name) == (1.0 if name == "mean_acceptance_length" else 0.0)


ORIGINS = ("draft_shape", "accepted_shares", "drafted_share")
IN_WORDS = {"drafter_state": "down: no such file", "speculation": "beside: as set"}


def test_states_are_told_with_their_reasons() -> None:
    stats = RequestStats(drafter="down", drafter_reason="no such file", schedule="beside", schedule_reason="as set")
    assert {name: getattr(stats, name) for name in IN_WORDS} == IN_WORDS
    assert (RequestStats().drafter_state, RequestStats().speculation) == ("none", "off: no drafter")


def test_speed_is_never_negative() -> None:
    assert RequestStats(num_new_tokens=0, wall_s=2.0).decode_tokens_per_s == 0.0


def test_hit_rate_counts_hits_at_once_and_late_ones() -> None:
    assert RequestStats(target_passes=8, hits=3, late_hits=2).hit_rate == 5 / 8


NAMES = ("beam", "suffix")


def offer(*depths: int) -> Nodes:
    """Return candidates that lie so deep; nothing else of them is looked at."""
    count = len(depths)
    return Nodes((0,) * count, (-1,) * count, (-1.0,) * count, depths)


def test_candidates_are_counted_by_who_proposed_them() -> None:
    stats = RequestStats()
    stats.count_verification(replace(offer(1, 1, 2, 2), writers=(2, 3, 1, 2)), (1, 3), NAMES)
    stats.count_verification(replace(offer(1), writers=(1,)), (0,), NAMES)
    assert stats.verified_by_writer == {"suffix": 2, "beam+suffix": 1, "beam": 2}
    assert stats.accepted_by_writer == {"suffix": 1, "beam+suffix": 1, "beam": 1}


def test_shares_of_writers_make_one_and_what_two_proposed_is_drafted() -> None:
    stats = RequestStats()
    assert (stats.accepted_shares, stats.drafted_share) == ({}, 0.0)
    stats.count_verification(replace(offer(1, 2, 3, 4), writers=(2, 3, 1, 2)), (0, 1, 2, 3), NAMES)
    assert stats.accepted_shares == {"suffix": 0.5, "beam+suffix": 0.25, "beam": 0.25}
    assert stats.drafted_share == 0.5 and sum(stats.accepted_shares.values()) == 1.0


def test_drafts_are_what_they_were_most_often() -> None:
    stats = RequestStats()
    stats.count_drafts(0, 0)
    assert (stats.draft_shape, stats.drafted_chains, stats.drafted_trees) == ("", 0, 0)
    stats.count_drafts(5, 5)
    assert (stats.draft_shape, stats.drafted_chains) == ("chain", 1)
    stats.count_drafts(6, 5)
    assert (stats.draft_shape, stats.drafted_chains, stats.drafted_trees) == ("tree", 1, 1)
    stats.count_drafts(1, 1)
    assert stats.draft_shape == "chain"


def test_verifications_are_counted_per_depth() -> None:
    stats = RequestStats()
    stats.count_verification(offer(1, 1, 1, 2, 2, 2, 3), (0, 3), NAMES)
    stats.count_verification(NO_NODES, (), NAMES)
    stats.count_verification(offer(1, 2, 3, 4, 5), (0, 1, 2, 3, 4), NAMES)
    stats.count_verification(offer(1, 1), (), NAMES)
    assert (stats.target_passes, stats.verified_tokens, stats.accepted_tokens) == (4, 14, 7)
    assert stats.offered_per_depth == [3, 2, 2, 1, 1]
    assert stats.accepted_per_depth == [2, 2, 1, 1, 1]


def test_counters_of_two_requests_are_apart() -> None:
    RequestStats().count_verification(offer(1, 2), (0, 1), NAMES)
    assert RequestStats().offered_per_depth == []


def test_all_counters_and_figures_are_written_as_plain_json() -> None:
    stats = dataclasses.replace(EXAMPLE, drafter="down", drafter_reason="no such file", seed=2**63 - 1)
    stats.count_verification(replace(offer(1, 2), writers=(1, 3)), (0,), NAMES)
    written = stats.as_dict()
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert set(written) == {field.name for field in dataclasses.fields(RequestStats)} | {*DERIVED, *IN_WORDS, *ORIGINS}
    assert all(written[name] == getattr(stats, name) for name in written)
