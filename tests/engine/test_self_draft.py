"""Parts of a target that drafts for itself: what it looks up, and when its requests verify."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config.selection import SelfDrafting, parse_selection
from card.engine.phases import Phases
from card.engine.self_draft import SelfDraft
from card.engine.target import TargetWorker
from card.errors import SettingsError
from card.tree.nodes import ROOT


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), max_size=4))
def test_candidates_follow_what_the_text_has_behind_the_end_of_text_and_draft(
    text: list[int], draft: list[int]
) -> None:
    drafts = SelfDraft(SelfDrafting(parse_selection("quest"), num_looked_up=6), 20, text)
    for token in draft:
        drafts.take(token, np.zeros(4, np.float32))
    found, whole = drafts.candidates(99), [*text, *draft]
    suffixes = [whole[-size:] for size in range(1, len(whole) + 1)]
    matches = [one for one in suffixes if any(text[i : i + len(one)] == one for i in range(len(text) - len(one)))]
    longest = max(matches, key=len, default=[])
    after = {text[i + len(longest)] for i in range(len(text) - len(longest)) if text[i : i + len(longest)] == longest}
    at_top = {token for token, parent in zip(found.tokens, found.parents, strict=True) if parent == ROOT}
    assert at_top <= after if longest else not found
    assert len(found) <= 6


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
