"""The suffix automaton knows what a plain search knows: the longest repeated suffix, its followers and their counts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import EngineSettings
from card.drafting.local.lookup import chance_per_count
from card.drafting.local.protocol import Observation
from card.drafting.local.suffix import SuffixAutomaton, SuffixWriter, best_first
from card.tree.nodes import Nodes
from tests.local_writing import assert_well_formed

VOCAB_SIZE = 5
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60)
short_alphabet_texts = st.lists(st.integers(0, 1), min_size=1, max_size=40)
phrases = st.sampled_from([[3, 0, 1], [4, 0, 1], [0, 2], [0], [2, 0]])
phrased_texts = st.lists(phrases, min_size=1, max_size=14).map(lambda some: list(itertools.chain(*some)))


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


def proposed_after(text: Sequence[int], *, num_prompt: int, budget: int) -> Nodes:
    """Return the proposal for ``text``, of which all behind the prompt was observed, in pieces of up to 3 tokens."""
    sequence = SuffixWriter(EngineSettings(), VOCAB_SIZE).open(text[:num_prompt])
    for start in range(num_prompt, len(text), 3):
        new_ids = tuple(text[start : start + 3])
        sequence.observe(Observation(new_ids, (), (), (new_ids[-1],), ()))
    return sequence.propose((), budget)


def counts_after(text: Sequence[int], context: Sequence[int]) -> Counter[int]:
    """Return how often each token followed ``context``, comparing lists."""
    n = len(context)
    return Counter(text[i + n] for i in range(len(text) - n) if list(text[i : i + n]) == list(context))


def longest_followed_suffix(text: Sequence[int], end: Sequence[int], most: int) -> list[int]:
    """Return the longest suffix of ``end``, of ``most`` tokens at most, that something follows in ``text``."""
    for n in range(min(most, len(end)), 0, -1):
        if counts_after(text, end[-n:]):
            return list(end[-n:])
    return []


@given(text=texts | phrased_texts, asked=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_a_proposal_is_the_same_whatever_was_asked_for_before(text: list[int], asked: list[int]) -> None:
    sequence = SuffixWriter(EngineSettings(), VOCAB_SIZE).open(text)
    for budget in asked:
        assert sequence.propose((), budget) == proposed_after(text, num_prompt=len(text), budget=budget)


@given(text=texts | short_alphabet_texts | phrased_texts)
def test_the_match_is_the_longest_suffix_that_also_occurs_earlier(text: list[int]) -> None:
    _, length = automaton_of(text).longest_repeated_suffix()
    assert length == len(longest_followed_suffix(text, text, len(text) - 1))


# With up to 32 tokens, all suffixes are counted: see SuffixAutomaton.
@given(text=texts | short_alphabet_texts | phrased_texts, num_prompt=st.integers(1, 60), budget=st.integers(0, 40))
def test_each_candidate_weighs_its_share_of_what_followed_its_context(
    text: list[int], num_prompt: int, budget: int
) -> None:
    text = text[:32]
    proposal = proposed_after(text, num_prompt=num_prompt, budget=budget)
    assert_well_formed(proposal, budget)
    assert all(path_logprob >= math.log(0.0199) for path_logprob in proposal.path_logprobs)  # others are left
    paths: list[tuple[list[int], list[int]]] = []  # context of each candidate's children, text up to it
    for token, parent, path_logprob in zip(proposal.tokens, proposal.parents, proposal.path_logprobs, strict=True):
        before, end = paths[parent] if parent >= 0 else (text[1:], text)
        context = longest_followed_suffix(text, end, len(before))
        counts = counts_after(text, context)
        parent_logprob = proposal.path_logprobs[parent] if parent >= 0 else 0.0
        chance = math.exp(path_logprob - parent_logprob)
        expected = counts[token] * chance_per_count(len(context), counts.total())
        assert abs(chance - expected) < 1e-9
        paths.append(([*context, token], [*end, token]))


@given(period=st.lists(st.integers(0, 1), min_size=1, max_size=6), length=st.integers(100, 300))
def test_a_long_repetitive_text_gets_a_well_formed_tree_though_not_all_is_counted(
    period: list[int], length: int
) -> None:
    text = (period * length)[:length]
    assert_well_formed(proposed_after(text, num_prompt=1, budget=16), 16)


@given(text=texts | short_alphabet_texts, budget=st.integers(1, 20))
def test_a_larger_budget_adds_candidates_and_changes_none(text: list[int], budget: int) -> None:
    small, large = (proposed_after(text, num_prompt=1, budget=most) for most in (budget, 2 * budget))
    assert small.tokens == large.tokens[: len(small)]
    assert small.parents == large.parents[: len(small)]
    assert list(large.path_logprobs) == sorted(large.path_logprobs, reverse=True)


def test_all_that_followed_is_proposed_the_most_frequent_first() -> None:
    text = [0, 1, 2, 3, 0, 1, 4, 3, 0, 1, 2, 2, 0, 1]
    proposal = proposed_after(text, num_prompt=4, budget=16)
    first_layer = [token for token, parent in zip(proposal.tokens, proposal.parents, strict=True) if parent < 0]
    assert first_layer == [2, 4]


def test_a_context_that_came_behind_several_others_counts_all_of_them() -> None:
    text = [3, 0, 1, 3, 0, 1, 4, 0, 1, 0, 2, 0]
    proposal = proposed_after(text, num_prompt=4, budget=2)
    assert proposal.tokens[0] == 1
    assert math.exp(proposal.path_logprobs[0]) == pytest.approx(3 * chance_per_count(1, 4))


def test_the_newer_of_two_followers_goes_first() -> None:
    proposal = proposed_after([0, 1, 2, 0, 1, 3, 0, 1], num_prompt=4, budget=1)
    assert proposal.tokens == (3,)


def test_a_text_without_any_repeated_token_gets_no_candidates() -> None:
    assert len(proposed_after([0, 1, 2, 3, 4], num_prompt=2, budget=8)) == 0


def test_a_text_that_repeats_one_token_is_followed_over_the_whole_budget() -> None:
    proposal = proposed_after([4] + [2] * 20, num_prompt=4, budget=12)
    assert proposal.tokens == (2,) * 12
    assert proposal.parents == tuple(range(-1, 11))


@given(num_edges=st.integers(1, 40), budget=st.integers(0, 100))
def test_the_best_first_tree_takes_the_likeliest_and_leaves_what_is_hopeless(num_edges: int, budget: int) -> None:
    def followers(depth: int, min_chance: float) -> list[tuple[int, float, int]]:
        chances = [0.5 ** (token + 1) for token in range(num_edges) if depth < 3]
        return [(token, chance, depth + 1) for token, chance in enumerate(chances) if chance >= min_chance]

    proposal = best_first(0, followers, budget)
    assert_well_formed(proposal, budget)
    # Every path is one over a power of two; those down to 1/32 are kept: tokens a, b, c cost a + 1, ... halvings.
    costs = sorted(
        cost
        for cost in [a + 1 for a in range(num_edges)]
        + [a + b + 2 for a in range(num_edges) for b in range(num_edges)]
        + [a + b + c + 3 for a in range(num_edges) for b in range(num_edges) for c in range(num_edges)]
        if cost <= 5
    )
    taken = [round(-path_logprob / math.log(2)) for path_logprob in proposal.path_logprobs]
    assert taken == costs[:budget]


def chain(proposal: Nodes) -> list[int]:
    """Return the tokens of a proposal that must be one chain."""
    assert list(proposal.parents) == list(range(-1, len(proposal) - 1))
    return list(proposal.tokens)


def test_an_expected_text_is_proposed_after_the_prompt_and_wherever_it_is_met_again() -> None:
    sequence = SuffixWriter(EngineSettings(), 100).open([1, 2, 3])
    sequence.expect([10, 11, 12, 13, 14])
    assert chain(sequence.propose((), 3)) == [10, 11, 12]
    assert chain(sequence.propose((), 9)) == [10, 11, 12, 13, 14]
    for token in (10, 50, 12):  # which differs in its second token
        sequence.observe(Observation((token,), (), (), (), ()))
    assert chain(sequence.propose((), 9))[:2] == [13, 14]
    for token in (13, 14):
        sequence.observe(Observation((token,), (), (), (), ()))
    assert -1 not in sequence.propose((), 9).tokens, "nothing follows the end of the text"


@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    expected=st.lists(st.integers(0, 4), max_size=40),
    later=st.lists(st.integers(0, 4), max_size=20),
)
def test_every_proposal_with_an_expected_text_is_well_formed(
    prompt: list[int], expected: list[int], later: list[int]
) -> None:
    sequence = SuffixWriter(EngineSettings(), 5).open(prompt)
    sequence.expect(expected)
    for token in later:
        proposal = sequence.propose((), 12)
        assert_well_formed(proposal, 12)
        assert all(0 <= one < 5 for one in proposal.tokens)
        sequence.observe(Observation((token,), (), (), (), ()))
