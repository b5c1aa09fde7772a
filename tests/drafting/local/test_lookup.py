"""Prompt lookup finds the latest of the longest matches, as a plain search does, and copies what followed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import EngineSettings
from card.drafting.local.lookup import LookupSequence, LookupWriter, chance_per_count
from card.drafting.local.protocol import Observation
from card.tree.nodes import Nodes
from tests.local_writing import assert_well_formed

VOCAB_SIZE = 5
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=60)
short_alphabet_texts = st.lists(st.integers(0, 1), min_size=1, max_size=40)


def committed(*token_ids: int) -> Observation:
    """What a pass without candidates tells."""
    return Observation(token_ids, (), (), (token_ids[-1],), ())


def proposed_after(
    text: Sequence[int], *, num_prompt: int, budget: int, min_ngram: int = 2, max_ngram: int = 8
) -> Nodes:
    """Return the proposal for ``text``, of which all behind the prompt was observed, in pieces of up to 3 tokens."""
    sequence = LookupSequence(text[:num_prompt], VOCAB_SIZE, min_ngram=min_ngram, max_ngram=max_ngram)
    for start in range(num_prompt, len(text), 3):
        sequence.observe(committed(*text[start : start + 3]))
    return sequence.propose((), budget)


def by_plain_search(text: Sequence[int], *, budget: int, min_ngram: int, max_ngram: int) -> tuple[int, ...]:
    """Return what followed the latest earlier occurrence of the longest run, comparing lists."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return tuple(text[end : end + budget])
    return ()


@given(
    text=texts | short_alphabet_texts,
    num_prompt=st.integers(1, 60),
    budget=st.integers(0, 20),
    ngrams=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_the_chain_is_what_a_plain_search_for_the_latest_longest_match_finds(
    text: list[int], num_prompt: int, budget: int, ngrams: tuple[int, int]
) -> None:
    limits = {"min_ngram": min(ngrams), "max_ngram": max(ngrams)}
    proposal = proposed_after(text, num_prompt=num_prompt, budget=budget, **limits)
    assert_well_formed(proposal, budget)
    assert proposal.parents == tuple(range(-1, len(proposal) - 1))
    assert proposal.tokens == by_plain_search(text, budget=budget, **limits)


@given(length=st.integers(1, 200), total=st.integers(1, 50))
def test_the_prior_is_a_probability_that_grows_with_the_match_and_with_what_was_seen(length: int, total: int) -> None:
    prior = chance_per_count(length, total)
    assert 0.0 < total * prior < 1.0
    assert chance_per_count(length + 1, total) > prior
    assert (total + 1) * chance_per_count(length, total + 1) > total * prior


@pytest.mark.parametrize(("shorter", "longer"), [*itertools.pairwise(range(2, 12))])
def test_a_longer_match_promises_clearly_more(shorter: int, longer: int) -> None:
    def promised(length: int) -> float:
        run = list(range(length))
        writer = LookupWriter(EngineSettings(), 100)
        sequence = writer.open([50, *run, 60, 61, 51])
        for token in run:  # one after the other, as in decoding: the match grows past max_ngram too
            sequence.observe(committed(token))
        proposal = sequence.propose((), 4)
        assert proposal.tokens[:2] == (60, 61)
        return math.exp(proposal.path_logprobs[0])

    assert 0.3 <= promised(shorter) < promised(longer) - 0.005 <= 0.97


def test_the_promise_falls_with_depth() -> None:
    proposal = proposed_after([0, 1, 2, 3, 4, 0, 1], num_prompt=7, budget=3)
    assert proposal.tokens == (2, 3, 4)
    first, second, third = proposal.path_logprobs
    assert 0.0 > first > second > third


def test_the_latest_of_two_equal_matches_is_followed() -> None:
    assert proposed_after([0, 1, 2, 0, 1, 3, 0, 1], num_prompt=8, budget=1).tokens == (3,)


def test_a_longer_match_is_followed_before_a_later_one() -> None:
    assert proposed_after([2, 0, 1, 3, 0, 1, 4, 2, 0, 1], num_prompt=10, budget=1).tokens == (3,)
