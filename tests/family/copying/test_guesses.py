"""N-gram pools against plain lists, learnt chances against counts, the tree of guesses against all paths."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.family.copying.guesses import Guesses, NgramPool, RankRates, guess_rates, merged
from card.tree.nodes import ROOT, MergedNodes
from tests.local_observing import scores_of

tokens = st.integers(0, 3)


class PlainPool:
    """All n-grams in one list, oldest first."""

    def __init__(self, per_key: int) -> None:
        self.per_key = per_key
        self.entries: list[tuple[int, tuple[int, ...]]] = []

    def insert(self, key: int, rest: tuple[int, ...]) -> None:
        self.entries = [entry for entry in self.entries if entry != (key, rest)] + [(key, rest)]
        for old in [entry for entry in self.entries if entry[0] == key][: -self.per_key]:
            self.entries.remove(old)

    def replace(self, key: int, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        self.entries = [entry for entry in self.entries if entry != (key, old)]
        self.insert(key, new)

    def newest(self, key: int) -> list[tuple[int, ...]]:
        return [rest for other, rest in reversed(self.entries) if other == key]


@given(
    per_key=st.integers(1, 4),
    changes=st.lists(st.tuples(tokens, st.tuples(tokens, tokens), st.none() | st.tuples(tokens, tokens)), max_size=40),
)
def test_a_pool_keeps_the_newest_ngrams_of_each_key(
    per_key: int, changes: list[tuple[int, tuple[int, int], tuple[int, int] | None]]
) -> None:
    pool, model = NgramPool(3, per_key), PlainPool(per_key)
    for key, rest, old in changes:
        if old is None:
            pool.insert(key, rest)
            model.insert(key, rest)
        else:
            pool.replace(key, old, rest)
            model.replace(key, old, rest)
        assert [pool.newest(one) for one in range(4)] == [model.newest(one) for one in range(4)]
        assert pool.newest(key, 1) == model.newest(key)[:1]


@given(text=st.lists(tokens, max_size=20), length=st.integers(2, 5))
def test_a_text_teaches_each_of_its_ngrams(text: list[int], length: int) -> None:
    pool, model = NgramPool(length, 2), PlainPool(2)
    pool.learn_text(text)
    for start in range(len(text)):
        if start + length <= len(text):
            model.insert(text[start], tuple(text[start + 1 : start + length]))
    assert [pool.newest(one) for one in range(4)] == [model.newest(one) for one in range(4)]


def test_the_chance_of_a_rank_is_its_prior_until_guesses_tell() -> None:
    rates = RankRates((0.5, 0.25), weight=4.0)
    assert rates.costs() == pytest.approx([math.log(2), math.log(4)])
    rates.learn((7, 8, 9), 8)  # rank 0 was wrong, rank 1 right, a rank 2 is not kept
    assert rates.costs() == pytest.approx([math.log(5 / 2), math.log(5 / 2)])
    rates.learn((7,), 8)  # no guess of rank 1 was made
    assert rates.costs() == pytest.approx([math.log(6 / 2), math.log(5 / 2)])


def test_the_chance_of_a_rank_comes_near_what_is_seen() -> None:
    rates = RankRates((0.1, 0.1), weight=5.0)
    for i in range(1000):
        rates.learn((0, 1), 1 if i % 4 else 0)
    assert [math.exp(-cost) for cost in rates.costs()] == pytest.approx([0.25, 0.75], abs=0.01)


def test_what_continuations_begin_with_in_common_is_one_guess() -> None:
    assert merged([(1, 2, 3), (4, 5), (1, 2, 6), (1, 7)]) == {1: {2: {3: {}, 6: {}}, 7: {}}, 4: {5: {}}}
    assert list(merged([(4,), (1,), (4,)])) == [4, 1], "best first"


def test_equal_tokens_below_one_parent_are_one_node_with_the_best_score_given() -> None:
    tree = MergedNodes()
    first = tree.add(ROOT, 5, -3.0)
    below = tree.add(first, 5, -4.0)
    assert tree.add(ROOT, 5, -1.0) == first
    assert tree.add(first, 5, -9.0) == below
    assert scores_of(tree.nodes(1)) == {(5,): -1.0, (5, 5): -4.0}
    assert tree.nodes(1).num_probes == 1
    assert [tree.child(ROOT, 5), tree.child(first, 5), tree.child(ROOT, 6)] == [first, below, None]
    assert tree.nodes().depths == (1, 2)


def all_paths(guesses: Guesses) -> list[tuple[int, ...]]:
    below = [[(token,), *((token, *path) for path in all_paths(after))] for token, after in guesses.items()]
    return list(itertools.chain.from_iterable(below))


@given(
    rows=st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=5),
    seen=st.lists(st.lists(tokens, max_size=4), max_size=6),
    max_nodes=st.integers(0, 12),
)
def test_of_all_guesses_the_likeliest_paths_go_into_the_tree(
    rows: list[list[int]], seen: list[list[int]], max_nodes: int
) -> None:
    guesses, rates = merged(rows), guess_rates(5)
    for token_ids in seen:
        rates.learn(guesses, token_ids)
    full, part = MergedNodes(), MergedNodes()
    rates.add_guesses(full, ROOT, guesses, -0.5, 1000)
    rates.add_guesses(part, ROOT, guesses, -0.5, max_nodes)
    scores = scores_of(full.nodes())
    assert set(scores) == set(all_paths(guesses))
    assert all(score < (scores[path[:-1]] if len(path) > 1 else -0.5) for path, score in scores.items())
    expected = sorted(scores.values(), reverse=True)[:max_nodes]
    assert sorted(scores_of(part.nodes()).values(), reverse=True) == expected


def test_a_guess_that_was_right_gets_likelier_and_a_wrong_one_less_likely() -> None:
    guesses = merged([(1, 2, 3), (4, 5, 6)])

    def scores(*token_ids: int) -> dict[tuple[int, ...], float]:
        rates, tree = guess_rates(3), MergedNodes()
        rates.learn(guesses, token_ids)
        rates.add_guesses(tree, ROOT, guesses, 0.0, 100)
        return scores_of(tree.nodes())

    before, right, stopped, other, wrong = scores(), scores(1, 2, 3), scores(1, 9), scores(4), scores(9)
    assert right[1,] > before[1,] > wrong[1,]
    assert other[4,] > before[4,] > right[4,]
    assert right[1, 2] - right[1,] > before[1, 2] - before[1,] > stopped[1, 2] - stopped[1,]
    assert other[1, 2] - other[1,] == pytest.approx(before[1, 2] - before[1,]), "only the first token is known"
