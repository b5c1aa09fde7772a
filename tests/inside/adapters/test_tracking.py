"""Rows are found again by their tokens, against a slow model that knows their names."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from card.inside.adapters.tracking import FollowedText, RowTracker

MAX_LEN = 64


def rows_of(texts: list[list[int]]) -> np.ndarray:
    tokens = np.full((max(1, len(texts)), MAX_LEN), -7, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens


def tracker(max_parked: int = 64) -> RowTracker[FollowedText]:
    return RowTracker(FollowedText, max_parked=max_parked)


@given(seed=st.integers(0, 2**31), vocab=st.sampled_from([2, 50]))
def test_every_row_gets_the_text_that_it_goes_on_with(seed: int, vocab: int):
    rng = random.Random(seed)
    followed = tracker()
    names: dict[int, list[int]] = {}  # what the engine knows
    rows: list[int] = []
    for step in range(12):
        rng.shuffle(rows)
        rows = [name for name in rows if rng.random() < 0.8]
        back = [name for name in names if name not in rows and len(names[name]) < 50]
        rows += rng.sample(back, rng.randint(0, len(back)))
        if len(rows) < 5:
            names[step] = [rng.randrange(vocab) for _ in range(rng.randint(1, 6))]
            rows.append(step)
        lengths = [len(names[name]) for name in rows]
        found = followed.follow(lengths, rows_of([names[name] for name in rows]))
        assert len({id(text) for text in found.texts}) == len(rows)  # one text is in one row
        for name, text in zip(rows, found.texts, strict=True):
            assert text is not None
            assert text.token_ids == names[name]
            new_ids = [rng.randrange(vocab) for _ in range(rng.randint(0, 3))]
            text.append(new_ids)
            names[name] = names[name] + new_ids


def test_a_text_without_a_row_is_parked_found_again_and_at_last_forgotten():
    followed = tracker(max_parked=1)
    first = followed.follow([2, 2], rows_of([[1, 2], [3, 4]]))
    assert len(first.begun) == 2
    second = followed.follow([2], rows_of([[3, 4]]))
    assert [text.token_ids for text in second.left] == [[1, 2]]
    assert second.texts[0] is first.texts[1]
    third = followed.follow([2, 2], rows_of([[3, 4], [1, 2]]))
    assert third.resumed == [first.texts[0]]
    assert not third.begun
    fourth = followed.follow([], rows_of([]))
    assert len(fourth.left) == 2
    assert fourth.forgotten == [first.texts[1]]
    assert len(followed._parked) == 1


def test_rows_without_tokens_or_longer_than_their_array_are_not_followed():
    found = tracker().follow([0, MAX_LEN + 1, -1], rows_of([[], [], []]))
    assert found.texts == [None, None, None]


def test_equal_texts_are_two():
    found = tracker().follow([3, 3], rows_of([[1, 2, 3], [1, 2, 3]]))
    assert found.texts[0] is not found.texts[1]


def test_all_texts_can_be_forgotten():
    followed = tracker()
    followed.follow([1, 1], rows_of([[1], [2]]))
    followed.follow([1], rows_of([[1]]))
    assert sorted(text.token_ids for text in followed.forget_all()) == [[1], [2]]
    assert len(followed._parked) == 0
