"""Phrases: what is proposed, what a pass teaches, against a search through the tree, and what it is all worth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import EngineSettings
from card.drafting.local.protocol import Observation
from card.engine.offers import Offers
from card.family.copying.guesses import NgramPool
from card.family.copying.phrases import PhraseSequence, PhraseWriter
from card.tree.nodes import NO_NODES, PATH_END, ROOT, Nodes
from tests.examples import settings
from tests.local_observing import paths_of, plain, random_target, run, scores_of, shaken, tree
from tests.local_writing import Target, hung, play

VOCAB_SIZE = 6
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)


def opened(prompt: Sequence[int], **changes: int) -> PhraseSequence:
    return PhraseSequence(prompt, NgramPool(changes.get("ngram", 4), 100), num_phrases=3)


def phrases_of(sequence: PhraseSequence) -> set[tuple[int, ...]]:
    """Return each phrase with the token before it."""
    return {(key, *rest) for key in range(100) for rest in sequence.pool.newest(key)}


def drafter_of(target: Target, *, length: int, error_rate: float) -> Callable[[Sequence[int]], list[int]]:
    """Return a drafter of paths that follow the target, each token wrong with a chance of ``error_rate``."""

    def best_path(text: Sequence[int]) -> list[int]:
        rng = random.Random(len(text))
        path: list[int] = []
        for _ in range(length):
            path.append(rng.randrange(VOCAB_SIZE) if rng.random() < error_rate else target([*text, *path]))
        return path

    return best_path


def ngrams(text: Sequence[int], length: int) -> set[tuple[int, ...]]:
    return {tuple(text[start : start + length]) for start in range(len(text) - length + 1)}


@given(
    prompt=texts,
    seed=st.integers(0, 99),
    budget=st.integers(1, 24),
    ngram=st.integers(2, 5),
    error_rate=st.sampled_from((0.0, 0.2, 1.0)),
)
def test_proposals_are_well_formed_and_the_text_is_that_of_plain_decoding(
    prompt: list[int], seed: int, budget: int, ngram: int, error_rate: float
) -> None:
    target = random_target(seed, VOCAB_SIZE, 2)
    sequence = opened(prompt, ngram=ngram)
    drafter = drafter_of(target, length=seed % 6, error_rate=error_rate)
    played = play(sequence, prompt, target, num_new=20, budget=budget, best_path=drafter)
    assert played.token_ids == plain(prompt, target, len(played.token_ids) - len(prompt))


# ---- what is proposed -----------------------------------------------------------------------------------------------


def test_the_newest_phrases_are_proposed_below_the_end_of_the_best_path() -> None:
    sequence = opened([5, 0, 0, 0, 5, 1, 2, 3, 5, 1, 2, 4, 5, 3, 3, 3, 9, 9, 9, 9])
    proposal = sequence.propose([7, 5], 30)
    assert PATH_END in proposal.parents
    assert ROOT not in proposal.parents
    assert proposal.num_probes == 0
    expected = {(3,), (3, 3), (3, 3, 3), (1,), (1, 2), (1, 2, 4), (1, 2, 3)}
    assert set(paths_of(proposal)) == expected, "the oldest of the four is left out"


def test_without_a_path_the_phrases_follow_the_last_committed_token() -> None:
    sequence = opened([5, 1, 2, 3, 8, 8, 8])
    assert sequence.propose((), 9) == NO_NODES
    sequence.observe(Observation((5,), (), (), (5,), ()))
    assert paths_of(sequence.propose((), 9)) == [(1,), (1, 2), (1, 2, 3)]


def test_nothing_is_proposed_if_no_phrase_is_known_or_none_finds_room() -> None:
    sequence = opened([5, 1, 2, 3, 8])
    assert sequence.propose([5, 7], 9) == NO_NODES
    assert sequence.propose([7, 5], 2) == NO_NODES
    assert paths_of(sequence.propose([7, 5], 3)) == [(1,)], "the path goes into the budget too"


def test_an_unsure_drafters_path_is_no_surer_for_the_phrases_below_it() -> None:
    drafted = Nodes((7, 5), (-1, 0), (-2.0, -4.0), (1, 2))
    offers = Offers({"phrases": lambda: opened([5, 1, 2, 3, 8])}, vocab_size=VOCAB_SIZE + 10)
    merged = offers.merge(drafted, 9, 9)
    assert merged.tokens == (7, 5, 1, 2, 3)
    assert merged.writers == (1, 1, 2, 2, 2)
    assert merged.path_logprobs[:3] == pytest.approx((-2.0, -4.0, -4.0 + math.log(0.35)))


def test_the_scores_of_phrases_follow_from_how_often_they_were_right_behind_a_right_path() -> None:
    def score(*new_ids: int) -> float:
        sequence = opened([5, 1, 2, 3, 8])
        for _ in range(5):
            sequence.pool.insert(5, (1, 2, 3))
            sequence.propose([5], 9)
            sequence.observe(Observation(new_ids, (), (), (new_ids[0],), ()))
        sequence.pool.insert(5, (1, 2, 3))
        return scores_of(sequence.propose([5], 9))[1,]

    untold = score(4)  # the path was wrong, which tells nothing about the phrase
    assert untold == pytest.approx(math.log(0.35))
    assert score(5, 1) > untold > score(5, 9)


# ---- what a pass teaches --------------------------------------------------------------------------------------------


def test_the_text_gives_its_phrases_and_the_newest_comes_first() -> None:
    sequence = opened([1, 2, 3, 4, 1])
    sequence.observe(Observation((2, 9), (2,), (-1,), (2, 9), (0,)))
    sequence.observe(Observation((8,), (), (), (8,), ()))
    assert phrases_of(sequence) == ngrams([1, 2, 3, 4, 1, 2, 9, 8], 4)
    assert sequence.pool.newest(1) == [(2, 9, 8), (2, 3, 4)]


def test_a_rejected_branch_teaches_where_the_target_agrees_with_it_again() -> None:
    sequence = opened([0])
    # 0 -> 5 -> 6 -> 7, with the target saying 1 after 0, 6 after 5, 7 after 6, 8 after 7.
    sequence.observe(Observation((1,), (5, 6, 7), (-1, 0, 1), (1, 6, 7, 8), ()))
    assert phrases_of(sequence) == {(5, 6, 7, 8)}


def test_a_rejected_branch_teaches_nothing_where_the_target_disagrees_with_it_again() -> None:
    sequence = opened([0])
    sequence.observe(Observation((1,), (5, 6, 7), (-1, 0, 1), (1, 6, 9, 8), ()))
    assert phrases_of(sequence) == set()


def rejected_phrases(seen: Observation, length: int) -> set[tuple[int, ...]]:
    """Return what the target says along all downward stretches of rejected candidates that it agrees with."""
    stretches = [[idx] for idx in range(len(seen.tokens)) if idx not in seen.accepted]
    for _ in range(length - 2):
        stretches = [
            [*stretch, idx]
            for stretch in stretches
            for idx, (token, parent) in enumerate(zip(seen.tokens, seen.parents, strict=True))
            if parent == stretch[-1] and token == seen.choices[parent + 1]
        ]
    return {(seen.tokens[stretch[0]], *(seen.choices[idx + 1] for idx in stretch)) for stretch in stretches}


@settings(max_examples=100)
@given(prompt=texts, seed=st.integers(0, 9999), ngram=st.integers(2, 4), num_nodes=st.integers(0, 30))
def test_passes_teach_the_text_and_every_rejected_branch_that_the_target_goes_along_with(
    prompt: list[int], seed: int, ngram: int, num_nodes: int
) -> None:
    vocab_size = 3  # so that chance makes the target agree often
    rng, target = random.Random(seed), random_target(seed, vocab_size, 2)
    sequence, text = opened(prompt, ngram=ngram), list(prompt)
    expected = ngrams(prompt, ngram)
    for _ in range(3):
        seen = run(shaken(NO_NODES, rng, vocab_size=vocab_size, num_foreign=num_nodes), text, target)
        sequence.observe(seen)
        text += seen.new_ids
        expected |= ngrams(text, ngram) | rejected_phrases(seen, ngram)
        assert phrases_of(sequence) == expected


def test_a_proposed_phrase_is_replaced_by_the_targets_choices_along_it_even_behind_a_wrong_path() -> None:
    sequence = opened([5, 1, 2, 3, 8])
    proposal = sequence.propose([5], 9)
    assert proposal.tokens == (1, 2, 3)
    run_with_path = hung(proposal, [5])
    sequence.observe(Observation((7,), run_with_path.tokens, run_with_path.parents, (7, 1, 6, 4, 0), ()))
    assert sequence.pool.newest(5) == [(1, 6, 4)]


def test_phrases_are_found_by_their_tokens_wherever_the_pass_had_them() -> None:
    sequence = opened([5, 1, 2, 3, 5, 4, 4, 4, 8])
    sequence.propose([5], 20)
    # Another's 9 first; then path and phrases, the older phrase first.
    mixed = tree((-1, 9), (-1, 5), (1, 1), (2, 2), (1, 4), (4, 4), (0, 1))
    choices = (7, 0, 3, 30, 31, 32, 33, 0)
    sequence.observe(Observation((7,), mixed.tokens, mixed.parents, choices, ()))
    assert sequence.pool.newest(5) == [(3, 32, 33), (3, 30, 31)], "the newest stays the newest"


@pytest.mark.parametrize("run_part", [(), ((-1, 5),), ((-1, 5), (0, 1)), ((-1, 1), (0, 2), (1, 3))])
def test_a_phrase_that_was_not_run_whole_stays(run_part: tuple[tuple[int, int], ...]) -> None:
    sequence = opened([5, 1, 2, 3, 8])
    sequence.propose([5], 9)
    part = tree(*run_part)
    sequence.observe(Observation((7,), part.tokens, part.parents, (7, 0, 0, 0)[: len(part) + 1], ()))
    assert sequence.pool.newest(5) == [(1, 2, 3)]


def test_phrases_of_one_request_are_proposed_in_the_next_one_of_the_same_writer_alone() -> None:
    writer = PhraseWriter(EngineSettings(), VOCAB_SIZE)
    writer.open([1, 2, 3, 4, 5, 0] * 4).close()
    assert paths_of(writer.open([1]).propose((), 16))[:2] == [(2,), (2, 3)]
    assert PhraseWriter(EngineSettings(), VOCAB_SIZE).open([1]).propose((), 16) == NO_NODES


def test_what_a_verification_refused_is_proposed_to_the_next_request() -> None:
    writer = PhraseWriter(EngineSettings(), 10)
    # 0 -> 4 -> 5 -> 6 -> 7 -> 8 were drafted and the target says 1 after 0, but goes along from 4 on, to a 9 behind 8.
    seen = Observation((1,), (4, 5, 6, 7, 8), (-1, 0, 1, 2, 3), (1, 5, 6, 7, 8, 9), ())
    writer.open([0]).observe(seen)
    assert (5, 6, 7, 8, 9) in paths_of(writer.open([2]).propose([4], 16))


def test_a_pool_of_many_requests_forgets_the_tokens_that_it_has_not_heard_of_for_longest() -> None:
    pool = NgramPool(2, 8, max_keys=2)
    for key in (1, 2, 1, 3):
        pool.insert(key, (9,))
    assert [pool.newest(key) for key in (1, 2, 3)] == [[(9,)], [], [(9,)]]


# ---- what it is worth -----------------------------------------------------------------------------------------------


def test_phrases_lengthen_what_a_drafter_gets_accepted() -> None:
    verse = random.Random(3).sample(range(100), 40)

    def target(text: Sequence[int]) -> int:
        return verse[(verse.index(text[-1]) + 1) % 40]

    def accepted_per_pass(prompt: list[int]) -> float:
        sequence = PhraseWriter(EngineSettings(), 100).open(prompt)
        drafter = drafter_of(target, length=3, error_rate=0.0)
        played = play(sequence, prompt, target, num_new=35, best_path=drafter)
        return sum(accepted for _, accepted in played.rounds) / len(played.rounds)

    assert accepted_per_pass([verse[0]]) == 0, "nothing is known, so not even the path is proposed"
    assert accepted_per_pass(verse) == 3 + 5, "three of the drafter, then a whole phrase"
