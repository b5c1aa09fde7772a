"""Laws of all writers without a model: no harm to the text, whatever is verified, and copies of what repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import EngineSettings
from card.drafting.local import find_writer
from card.drafting.local.lookup import LookupWriter
from card.drafting.local.suffix import SuffixWriter
from tests.examples import settings
from tests.local_observing import plain, play_shaken, random_target, ranked_tokens
from tests.local_writing import WRITERS, play

VOCAB_SIZE = 12
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)


@pytest.mark.parametrize(("name", "kind"), [("lookup", LookupWriter), ("suffix", SuffixWriter)])
def test_a_writer_is_found_by_its_name(name: str, kind: type) -> None:
    assert find_writer(name) is kind


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=50)
@given(prompt=texts, seed=st.integers(0, 999), budget=st.integers(1, 40), has_top=st.booleans())
def test_passes_over_other_trees_than_the_proposed_do_no_harm(
    name: str, prompt: list[int], seed: int, budget: int, has_top: bool
) -> None:
    target = random_target(seed, VOCAB_SIZE, 2)
    sequence = find_writer(name)(EngineSettings(), VOCAB_SIZE).open(prompt)
    top = ranked_tokens(target, VOCAB_SIZE) if has_top else None
    text = play_shaken(sequence, prompt, target, seed=seed, vocab_size=VOCAB_SIZE, budget=budget, top=top)
    assert text == plain(prompt, target, len(text) - len(prompt))


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_repetitive_text_is_mostly_accepted(name: str) -> None:
    verse = [(7 * i * i + i) % 97 for i in range(40)]
    sequence = find_writer(name)(EngineSettings(), 97).open(verse[:3])
    played = play(sequence, verse[:3], lambda text: verse[len(text) % len(verse)], num_new=400)
    later = played.rounds[len(played.rounds) // 2 :]
    assert sum(accepted for _, accepted in later) > 0.9 * sum(len(proposal) for proposal, _ in later)
    assert len(played.rounds) < 120


@pytest.mark.parametrize("name", ["lookup", "suffix"])
@given(seed=st.integers(0, 2**31), prompt=st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_the_text_is_the_one_of_plain_decoding(name: str, seed: int, prompt: list[int]) -> None:
    def target(text: Sequence[int]) -> int:
        return hash((seed, *text[-2:])) % 5

    sequence = find_writer(name)(EngineSettings(), 5).open(prompt)
    played = play(sequence, prompt, target, num_new=60)
    sequence.close()
    assert played.token_ids == plain(prompt, target, len(played.token_ids) - len(prompt))
