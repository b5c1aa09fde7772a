"""Parts of a target that drafts for itself: what it looks up, and when its requests verify."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config.selection import SelfDrafting, parse_selection
from card.engine.phases import Phases
from card.engine.self_draft import looked_up
from card.engine.target import TargetWorker
from card.errors import SettingsError


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6))
def test_what_is_looked_up_follows_the_latest_earlier_place_of_the_last_tokens(text: list[int], most: int) -> None:
    expected: list[int] = []
    for size in (2, 3):  # a longer match comes first
        for end in range(size, len(text)):
            if text[end - size : end] == text[len(text) - size :]:
                expected = text[end : end + most]
    assert looked_up(text, most) == expected


def test_phases_keep_the_verifications_of_a_round_near_their_mean() -> None:
    """The published simulation in small: 64 places, eight drafts, texts of very different lengths."""
    rng = random.Random(0)
    spread = {}
    for is_placed in (True, False):
        phases, left, counts = Phases(), dict[int, int](), list[int]()
        began: dict[int, int] = {}
        next_id = 0
        for round_idx in range(3000):
            phases.begin_round()
            while len(left) < 64:
                left[next_id], began[next_id] = rng.randint(20, 400), round_idx
                next_id += 1
            due = [one for one in left if (phases.is_due(one, 8) if is_placed else (round_idx - began[one]) % 9 == 8)]
            counts.append(len(due))
            for one in list(left):
                left[one] -= 1
                if not left[one]:
                    del left[one]
                    phases.leave(one)
        spread[is_placed] = statistics.pstdev(counts[500:])
    assert spread[True] < 1.0 and spread[False] > 2.0


def test_a_target_that_cannot_read_chosen_rows_is_refused() -> None:
    class Plain:
        vocab_size = max_model_len = max_rows = row_bytes = 1

    with pytest.raises(SettingsError, match="cannot draft for itself: its passes cannot read"):
        TargetWorker(Plain(), clock=lambda: 0.0, self_drafting=SelfDrafting(parse_selection("sparse")))  # type: ignore[arg-type]
