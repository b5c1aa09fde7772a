"""Candidates of slots: exact chances of beginnings, repeats that survive, no blank, positions of a plain tree."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.family.ctc.candidates import ctc_tree, slot_tree
from card.tree.nodes import ROOT, Nodes
from tests.examples import settings

BLANK = -1


def paths_of(tree: Nodes) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((token,) if parent == ROOT else (*paths[parent], token))
    return paths


def written(path: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a path of slots writes: equal neighbours merged, then blanks deleted."""
    return tuple(token for token, _ in itertools.groupby(path) if token != BLANK)


def chances_of_beginnings(probs: np.ndarray, blank: np.ndarray) -> dict[tuple[int, ...], float]:
    """Return the summed chance of all paths whose text begins so, path by path."""
    num_slots, num_tokens = probs.shape
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(BLANK, num_tokens), repeat=num_slots):
        chance = math.prod(blank[t] if token == BLANK else probs[t, token] for t, token in enumerate(path))
        text = written(path)
        for length in range(1, len(text) + 1):
            found[text[:length]] = found.get(text[:length], 0.0) + chance
    return found


@st.composite
def slots(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    num_slots, num_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    logits = np.array(
        draw(
            st.lists(
                st.lists(st.floats(-3, 3), min_size=num_tokens + 1, max_size=num_tokens + 1),
                min_size=num_slots,
                max_size=num_slots,
            )
        )
    )
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return probs[:, :-1], probs[:, -1]


@settings(max_examples=30, deadline=None)
@given(slots=slots(), most=st.integers(1, 200))
def test_a_candidates_chance_is_the_sum_over_all_paths_whose_text_begins_with_it(slots, most) -> None:
    probs, blank = slots
    expected = chances_of_beginnings(probs, blank)
    tree = ctc_tree(probs, blank, most)
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths), "equal texts are one candidate"
    assert len(paths) == min(most, len(expected))
    for path, logprob in zip(paths, tree.path_logprobs, strict=True):
        assert math.exp(logprob) == pytest.approx(expected[path], rel=1e-9)
    if len(paths) < len(expected):  # none that was left out is likelier, as far as it hangs below those kept
        least = math.exp(tree.path_logprobs[-1])
        assert all(chance <= least + 1e-9 for path, chance in expected.items() if path not in set(paths))


@settings(max_examples=30)
@given(slots=slots(), most=st.integers(1, 30))
def test_a_tree_has_parents_before_children_that_are_no_likelier_and_never_a_blank(slots, most) -> None:
    for tree in (ctc_tree(*slots, most), slot_tree(slots[0], most)):
        assert list(tree.path_logprobs) == sorted(tree.path_logprobs, reverse=True)
        for idx, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            assert 0 <= token < slots[0].shape[1]
            assert parent < idx
            assert tree.path_logprobs[idx] <= (0.0 if parent == ROOT else tree.path_logprobs[parent])


def test_a_token_that_truly_comes_twice_survives_through_the_blank_between() -> None:
    probs, blank = np.zeros((4, 2)), np.zeros(4)
    probs[0, 1] = probs[2, 1] = probs[3, 0] = 1.0  # 1, blank, 1, 0
    blank[1] = 1.0
    assert paths_of(ctc_tree(probs, blank, 8)) == [(1,), (1, 1), (1, 1, 0)]


def test_a_token_that_fills_two_slots_is_one_token_and_leaves_no_gap_in_the_positions() -> None:
    probs, blank = np.zeros((4, 2)), np.zeros(4)
    probs[0, 1] = probs[1, 1] = probs[3, 0] = 1.0  # 1, 1, blank, 0
    blank[2] = 1.0
    tree = ctc_tree(probs, blank, 8)
    assert paths_of(tree) == [(1,), (1, 0)]
    assert tree.parents == (ROOT, 0), "the third slot's blank takes no place"


def test_without_ctc_equal_neighbours_are_two_tokens() -> None:
    probs = np.zeros((2, 2))
    probs[:, 1] = 1.0
    assert paths_of(slot_tree(probs, 8)) == [(1,), (1, 1)]
