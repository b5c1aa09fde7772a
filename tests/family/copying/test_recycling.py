"""Token recycling: successors against a plain table, the tree against all paths, and what they are worth."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import EngineSettings
from card.drafting.local.protocol import Observation
from card.family.copying.recycling import RecyclingSequence, RecyclingWriter
from card.tree.nodes import NO_NODES, PATH_END, ROOT, Nodes
from tests.examples import settings
from tests.local_observing import plain, random_target, ranked_tokens, run, scores_of, shaken
from tests.local_writing import play

VOCAB_SIZE = 12
tokens = st.integers(0, VOCAB_SIZE - 1)
texts = st.lists(tokens, min_size=1, max_size=30)


@given(prompt=texts, seed=st.integers(0, 99), order=st.integers(1, 3), budget=st.integers(1, 24), has_top=st.booleans())
def test_proposals_are_well_formed_and_the_text_is_that_of_plain_decoding(
    prompt: list[int], seed: int, order: int, budget: int, has_top: bool
) -> None:
    target = random_target(seed, VOCAB_SIZE, order)
    sequence = RecyclingWriter(EngineSettings(), VOCAB_SIZE).open(prompt)
    top = ranked_tokens(target, VOCAB_SIZE) if has_top else None
    played = play(sequence, prompt, target, num_new=20, budget=budget, top=top)
    assert played.token_ids == plain(prompt, target, len(played.token_ids) - len(prompt))


def successors(sequence: RecyclingSequence, token: int) -> tuple[int, ...]:
    """Return what may follow a token, best first."""
    return tuple(sequence.successors.get(token, ()))


class PlainTable:
    """The successors of every token as of the last pass over it, the text's own case before others in one pass."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.last = prompt[-1]
        self.rows: dict[int, list[int]] = {}
        for token, successor in itertools.pairwise(prompt):
            self.put_first(token, successor)

    def put_first(self, token: int, successor: int) -> None:
        row = self.rows.setdefault(token, [])
        self.rows[token] = [successor, *(other for other in row if other != successor)][:8]

    def observe(self, seen: Observation) -> None:
        nodes = [(self.last, seen.top_ids[0]), *zip(seen.tokens, seen.top_ids[1:], strict=True)]
        on_text = [nodes[0], *(nodes[idx + 1] for idx in seen.accepted)]
        for token, row in nodes + on_text:
            self.rows[token] = list(row[:8])
        self.last = seen.new_ids[-1]


@given(prompt=texts, seed=st.integers(0, 999))
def test_successors_are_those_of_the_last_pass_over_a_token(prompt: list[int], seed: int) -> None:
    rng, target = random.Random(seed), random_target(seed, VOCAB_SIZE, 2)

    def top(text: Sequence[int]) -> list[int]:  # differs from case to case, as real logits do
        return random.Random(hash(tuple(text))).sample(range(VOCAB_SIZE), 10)

    sequence, table, text = RecyclingSequence(prompt), PlainTable(prompt), list(prompt)
    for _ in range(6):
        proposal = shaken(NO_NODES, rng, vocab_size=VOCAB_SIZE, num_foreign=12)
        seen = run(proposal, text, target, top)
        sequence.observe(seen)
        table.observe(seen)
        text += seen.new_ids
        for token in range(VOCAB_SIZE):
            assert successors(sequence, token) == tuple(table.rows.get(token, ()))


def test_of_a_token_run_twice_in_one_pass_the_accepted_case_counts() -> None:
    sequence = RecyclingSequence([3, 1])
    rows = [[7], [70], [71], [72], [73]]
    seen = Observation((5, 2), (5, 5, 9, 5), (-1, 0, -1, 2), (5, 2, 0, 0, 0), (0,), rows)
    sequence.observe(seen)
    assert (successors(sequence, 1), successors(sequence, 5), successors(sequence, 9)) == ((7,), (70,), (72,))


def test_of_a_token_accepted_twice_in_one_pass_the_later_case_counts() -> None:
    sequence = RecyclingSequence([5])
    sequence.observe(Observation((5, 5, 2), (5, 5), (-1, 0), (5, 5, 2), (0, 1), [[5, 1], [5, 2], [2, 3]]))
    assert successors(sequence, 5) == (2, 3)


def test_rejected_candidates_teach_what_follows_them() -> None:
    sequence = RecyclingSequence([3])
    sequence.observe(Observation((1,), (8, 9), (-1, 0), (1, 9, 4), (), [[1], [9, 6], [4]]))
    assert [successors(sequence, token) for token in (3, 8, 9)] == [(1,), (9, 6), (4,)]


def test_a_prompt_gives_its_successors_newest_first_and_no_more_than_eight() -> None:
    assert successors(RecyclingSequence([1, 2, 1, 3, 1, 2, 4]), 1) == (2, 3)
    assert successors(RecyclingSequence([one for i in range(10) for one in (0, 20 + i)]), 0) == tuple(range(29, 21, -1))


def test_without_likeliest_tokens_the_choices_are_the_successors() -> None:
    sequence = RecyclingSequence([3, 1, 3])
    sequence.observe(Observation((5, 6), (5, 8), (-1, -1), (5, 6, 9), (0,)))
    assert [successors(sequence, token) for token in (3, 5, 8)] == [(5, 1), (6,), (9,)]


def test_requests_do_not_share_what_they_learn() -> None:
    writer = RecyclingWriter(EngineSettings(), VOCAB_SIZE)
    writer.open([1, 2, 1, 2, 1])
    assert len(writer.open([1]).propose((), 8)) == 0


def best_scores(sequence: RecyclingSequence, last: int, costs: Sequence[float], budget: int) -> list[float]:
    """Return the scores of the best ``budget`` paths, found among all of up to ``budget`` tokens."""
    found, layer = [], [(0.0, last)]
    for _ in range(budget):
        layer = [
            (score - costs[rank], token)
            for score, above in layer
            for rank, token in enumerate(successors(sequence, above))
        ]
        layer = sorted(layer, reverse=True)[:budget]  # what is not among them has as many better ones above or beside
        found += layer
    return sorted((score for score, _ in found), reverse=True)[:budget]


@settings(max_examples=30)
@given(prompt=st.lists(st.integers(0, 4), min_size=1, max_size=30), seed=st.integers(0, 999), budget=st.integers(1, 20))
def test_the_tree_holds_the_likeliest_paths_by_the_measured_chance_of_each_rank(
    prompt: list[int], seed: int, budget: int
) -> None:
    rng = random.Random(seed)
    sequence = RecyclingSequence(prompt)
    prior = (0.45, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
    hits, trials = [8.0 * chance for chance in prior], [8.0] * 8
    text = list(prompt)
    for _ in range(25):
        row = successors(sequence, text[-1])
        for rank in range(len(row)):
            trials[rank] += 1
        token = rng.choice([*row, *row[2:3] * 5, rng.randrange(5)])
        if token in row:
            hits[row.index(token)] += 1
        sequence.observe(Observation((token,), (), (), (token,), ()))
        text.append(token)
    costs = [math.log(trials[rank] / hits[rank]) for rank in range(8)]
    proposal = sequence.propose((), budget)
    assert list(proposal.path_logprobs) == pytest.approx(best_scores(sequence, text[-1], costs, budget))
    for path, score in scores_of(proposal).items():
        pairs = itertools.pairwise((text[-1], *path))
        assert score == pytest.approx(-sum(costs[successors(sequence, a).index(b)] for a, b in pairs))


def test_the_rank_that_the_target_takes_comes_first_after_a_while() -> None:
    sequence = RecyclingSequence([0])
    row = [4, 5, 6, 7]
    assert sequence.propose((), 4) == NO_NODES
    for _ in range(30):
        sequence.observe(Observation((6,), (), (), (6,), (), [row]))
        sequence.observe(Observation((0,), (), (), (0,), (), [[1, 2, 0, 3]]))
    assert scores_of(sequence.propose((), 3)).keys() == {(6,), (6, 0), (6, 0, 6)}


def test_the_chance_of_a_rank_is_learnt_from_what_was_known_before_the_pass() -> None:
    sequence = RecyclingSequence([0])
    before = sequence.propose((), 8)
    for token in range(1, 40):  # every token is new, so no successor was ever guessed
        sequence.observe(Observation((token,), (), (), (token,), (), [[token]]))
    sequence.observe(Observation((0,), (), (), (0,), (), [[0]]))
    assert len(before) == 0
    assert sequence.propose((), 1).path_logprobs == pytest.approx((math.log(0.45),))


def test_text_with_one_successor_per_token_is_accepted_whole() -> None:
    def target(text: Sequence[int]) -> int:
        return (text[-1] * 5 + 3) % 16  # a cycle through all 16 tokens

    sequence = RecyclingSequence([0])
    played = play(sequence, [0], target, num_new=400, budget=8, top=ranked_tokens(target, 16))
    late = [accepted for _, accepted in played.rounds[30:]]
    assert sum(late) / len(late) == 8


def test_random_text_of_few_successors_is_accepted_well() -> None:
    rng = random.Random(1)
    successors = {token: rng.sample(range(50), 3) for token in range(50)}
    drawn: dict[int, int] = {}

    def target(text: Sequence[int]) -> int:  # the first successor in six of ten cases
        choice = drawn.setdefault(len(text), rng.choices((0, 1, 2), (6, 3, 1))[0])
        return successors[text[-1]][choice]

    played = play(RecyclingSequence([0]), [0], target, num_new=600, budget=16, top=lambda text: successors[text[-1]])
    late = [accepted for _, accepted in played.rounds[40:]]
    assert sum(late) / len(late) > 1.8


# ---- below the best path of others ----------------------------------------------------------------------------------


def by_top(proposal: Nodes) -> dict[int, dict[tuple[int, ...], float]]:
    """Return the path scores below the last token, and those below the best path's end."""
    found: dict[int, dict[tuple[int, ...], float]] = {ROOT: {}, PATH_END: {}}
    places: list[tuple[int, tuple[int, ...]]] = []
    for token, parent, score in zip(proposal.tokens, proposal.parents, proposal.path_logprobs, strict=True):
        top, above = places[parent] if parent >= 0 else (parent, ())
        places.append((top, (*above, token)))
        found[top][*above, token] = score
    return found


def test_the_best_path_is_lengthened_by_what_follows_its_last_token() -> None:
    sequence = RecyclingSequence([5, 6, 7, 9, 1, 2, 1])
    found = by_top(sequence.propose([3, 5], 20))
    assert found[ROOT].items() <= scores_of(sequence.propose((), 20)).items()
    first = math.log(0.45)
    assert {path: score for path, score in found[PATH_END].items() if len(path) < 3} == {
        (6,): pytest.approx(first),
        (6, 7): pytest.approx(2 * first),
    }, "scored from the path's end on"
    assert not by_top(sequence.propose([3, 8], 20))[PATH_END], "nothing is known to follow that token"


@pytest.mark.parametrize(("was_right", "expected"), [(True, {ROOT: 1, PATH_END: 1}), (False, {ROOT: 2, PATH_END: 0})])
def test_paths_that_came_true_give_what_lengthens_them_an_earlier_turn(
    was_right: bool, expected: dict[int, int]
) -> None:
    sequence = RecyclingSequence([5, 6, 7, 9, 1, 2, 1])
    for _ in range(20):
        sequence.propose([4], 2)
        sequence.observe(Observation((4 if was_right else 8,), (), (), (0,), ()))
        sequence.observe(Observation((1,), (), (), (0,), ()))
    sequence.observe(Observation((2, 1), (), (), (2,), ()))
    assert {top: len(paths) for top, paths in by_top(sequence.propose([5], 2)).items()} == expected
