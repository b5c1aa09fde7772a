"""Lookahead: the window and its n-grams against plain Jacobi iterations, cut and mixed passes, and what it is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from card.config import EngineSettings
from card.drafting.local.protocol import Observation
from card.family.copying.lookahead import LookaheadSequence, LookaheadWriter
from card.tree.nodes import NO_NODES
from tests.local_observing import paths_of, plain, random_target, run, scores_of, shaken, tree
from tests.local_writing import Target, assert_well_formed, play

VOCAB_SIZE = 12
WHOLE = 10**6  # a budget that holds any window
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)


def opened(prompt: Sequence[int], **changes: int | bool) -> LookaheadSequence:
    sizes = {"window": 5, "ngram": 4, "guesses": 5, "learns_text": True}
    return LookaheadSequence(prompt, **(sizes | changes))  # type: ignore[arg-type]


def column_paths(sequence: LookaheadSequence) -> list[tuple[int, ...]]:
    """Return the tokens from below the last committed one to the tip of each column."""
    heads = [column[0] for column in sequence.columns]
    return [(*heads[1 : idx + 1], *column[1:]) for idx, column in enumerate(sequence.columns)]


def ngrams_of(sequence: LookaheadSequence) -> dict[int, list[tuple[int, ...]]]:
    found = {key: sequence.pool.newest(key) for key in range(100)}
    return {key: rest for key, rest in found.items() if rest}


@given(
    prompt=texts,
    seed=st.integers(0, 99),
    order=st.sampled_from((1, 2, 3, 100)),
    budget=st.integers(1, 40),
    window=st.integers(1, 6),
    ngram=st.integers(2, 5),
    learns_text=st.booleans(),
)
def test_proposals_are_well_formed_and_the_text_is_that_of_plain_decoding(
    prompt: list[int], seed: int, order: int, budget: int, window: int, ngram: int, learns_text: bool
) -> None:
    target = random_target(seed, VOCAB_SIZE, order)
    sequence = opened(prompt, window=window, ngram=ngram, guesses=3, learns_text=learns_text)
    played = play(sequence, prompt, target, num_new=20, budget=budget)
    assert played.token_ids == plain(prompt, target, len(played.token_ids) - len(prompt))


class Jacobi:
    """The window level by level and the pool as lists, with the target asked for one column after the other."""

    def __init__(self, prompt: Sequence[int], window: int, ngram: int, guesses: int, learns_text: bool) -> None:
        self.ngram, self.guesses, self.learns_text = ngram, guesses, learns_text
        starts = [column * len(prompt) // window for column in range(window)]
        levels = [[prompt[(start + level) % len(prompt)] for start in starts] for level in range(ngram - 1)]
        self.levels = [levels[0][1:], *levels[1:]]  # the first token of level 0 is the last committed one
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.learn_text(prompt, len(prompt))

    def insert(self, key: int, rest: tuple[int, ...]) -> None:
        known = self.pool.setdefault(key, [])
        self.pool[key] = [rest, *(other for other in known if other != rest)][: self.guesses]

    def learn_text(self, text: Sequence[int], num_new: int) -> None:
        for end in range(max(len(text) - num_new, self.ngram - 1), len(text)):
            if self.learns_text:
                start = end - self.ngram + 1
                self.insert(text[start], tuple(text[start + 1 : end + 1]))

    def iterate(self, text: list[int], target: Target) -> None:
        heads = [text[-1], *self.levels[0]]
        stacks = [[level[column] for level in self.levels[1:]] for column in range(len(heads))]
        new = [target([*text, *heads[1 : column + 1], *stack]) for column, stack in enumerate(stacks)]
        for head, stack, token in zip(heads, stacks, new, strict=True):
            self.insert(head, (*stack, token))
        shifted = [*self.levels[1:], new]
        self.levels = [shifted[0][1:], *shifted[1:]]

    def columns(self, last: int) -> tuple[tuple[int, ...], ...]:
        return tuple(zip([last, *self.levels[0]], *self.levels[1:], strict=True))


@given(
    prompt=texts,
    seed=st.integers(0, 99),
    order=st.sampled_from((1, 2, 3, 100)),
    window=st.integers(1, 6),
    ngram=st.integers(2, 5),
    guesses=st.integers(1, 4),
    learns_text=st.booleans(),
)
def test_window_and_pool_are_those_of_plain_jacobi_iterations(
    prompt: list[int], seed: int, order: int, window: int, ngram: int, guesses: int, learns_text: bool
) -> None:
    target = random_target(seed, VOCAB_SIZE, order)
    sequence = opened(prompt, window=window, ngram=ngram, guesses=guesses, learns_text=learns_text)
    model = Jacobi(prompt, window, ngram, guesses, learns_text)
    text = list(prompt)
    for _ in range(8):
        seen = run(sequence.propose((), WHOLE), text, target)
        sequence.observe(seen)
        model.iterate(text, target)
        text += seen.new_ids
        model.learn_text(text, len(seen.new_ids))
        assert tuple(sequence.columns) == model.columns(text[-1])
        assert ngrams_of(sequence) == model.pool


@given(prompt=texts, seed=st.integers(0, 99), budget=st.integers(1, 60))
def test_the_probes_are_as_many_leading_columns_as_half_of_the_budget_holds(
    prompt: list[int], seed: int, budget: int
) -> None:
    target = random_target(seed, VOCAB_SIZE, 2)
    sequence, text = opened(prompt), list(prompt)
    for _ in range(3):
        paths = column_paths(sequence)
        sizes = [len({path[:end] for path in paths[:count] for end in range(1, len(path) + 1)}) for count in range(6)]
        num_columns = max(count for count in range(6) if sizes[count] <= budget // 2)
        proposal = sequence.propose((), budget)
        assert proposal.num_probes == sizes[num_columns]
        probes = set(paths_of(proposal)[: proposal.num_probes])
        assert probes == {path[:end] for path in paths[:num_columns] for end in range(1, len(path) + 1)}
        seen = run(proposal, text, target)
        sequence.observe(seen)
        text += seen.new_ids


def test_a_window_of_different_tokens_takes_as_many_probes_as_documented() -> None:
    sequence = opened(list(range(100, 140)), window=5, ngram=4)
    assert sequence.propose((), WHOLE).num_probes == 4 + 5 * 2


def test_guesses_are_the_ngrams_of_the_last_token_and_probes_promise_little() -> None:
    sequence = opened([1, 2, 3, 4, 9, 1, 2, 5, 6, 9, 8, 8, 8, 1])
    scores = scores_of(sequence.propose((), WHOLE))
    guesses = {(2,), (2, 3), (2, 3, 4), (2, 5), (2, 5, 6)}
    assert guesses <= scores.keys()
    probes = {path[:end] for path in column_paths(sequence) for end in range(1, len(path) + 1)} - guesses
    assert scores.keys() - guesses == probes
    assert min(scores[path] for path in guesses) > max(scores[path] for path in probes)
    assert scores[2, 5] > scores[2, 3], "the newer one is likelier"


def test_a_node_that_is_probe_and_guess_has_the_score_of_the_guess() -> None:
    sequence = opened([1, 2, 3, 1], window=1, ngram=3)
    assert column_paths(sequence) == [(2,)]
    proposal = sequence.propose((), 8)
    assert (proposal.tokens, proposal.parents, proposal.num_probes) == ((2, 3), (-1, 0), 1)
    assert proposal.path_logprobs[0] > -2.0


@given(prompt=texts, seed=st.integers(0, 999))
def test_the_window_learns_the_same_from_a_pass_in_another_order_among_others_candidates(
    prompt: list[int], seed: int
) -> None:
    target, rng = random_target(seed, VOCAB_SIZE, 3), random.Random(seed)
    one, other = opened(prompt, learns_text=False), opened(prompt, learns_text=False)
    proposal = one.propose((), WHOLE)
    assert other.propose((), WHOLE) == proposal
    mixed = shaken(proposal, rng, vocab_size=VOCAB_SIZE, keep=1.0, num_foreign=8)
    one.observe(run(proposal, prompt, target))
    other.observe(run(mixed, prompt, target))
    assert ngrams_of(one) == ngrams_of(other) != {}


@given(prompt=texts, seed=st.integers(0, 999))
def test_columns_that_were_not_run_whole_wait_and_the_others_move_on(prompt: list[int], seed: int) -> None:
    target, rng = random_target(seed, VOCAB_SIZE, 3), random.Random(seed)
    sequence, text = opened(prompt, learns_text=False), list(prompt)
    for _ in range(4):
        before, paths = tuple(sequence.columns), column_paths(sequence)
        part = shaken(sequence.propose((), WHOLE), rng, vocab_size=VOCAB_SIZE, keep=0.7)
        seen = run(part, text, target)
        sequence.observe(seen)
        run_paths = set(paths_of(part))
        expected = [
            (*column[1:], target([*text, *path])) if path in run_paths else column
            for column, path in zip(before, paths, strict=True)
        ]
        text += seen.new_ids
        assert sequence.columns == [(text[-1], *expected[0][1:]), *expected[1:]]


def test_the_pass_that_ends_the_prompt_leaves_the_window_alone() -> None:
    sequence = opened([1, 2, 3, 4, 5, 6])
    before = tuple(sequence.columns)
    sequence.observe(Observation((7,), (), (), (7,), ()))
    assert tuple(sequence.columns) == ((7, *before[0][1:]), *before[1:])


def test_text_teaches_only_where_it_is_asked_to() -> None:
    assert opened([1, 2, 3, 4, 1], learns_text=False).pool.newest(1) == []
    sequence = opened([1, 2, 3, 4, 1], learns_text=True)
    assert sequence.pool.newest(1) == [(2, 3, 4)]
    sequence.observe(
        run(tree((-1, 2), (0, 3), (1, 5)), [1, 2, 3, 4, 1], lambda text: {1: 2, 2: 3, 3: 5, 5: 6}[text[-1]])
    )
    assert sequence.pool.newest(1) == [(2, 3, 5), (2, 3, 4)]
    assert sequence.pool.newest(2) == [(3, 5, 6), (3, 4, 1)]
    assert sequence.pool.newest(4) == [(1, 2, 3)]


def test_guesses_that_fail_get_less_likely() -> None:
    sequence = opened([0, 8, 8, 8, 0], window=1, ngram=2, guesses=1, learns_text=False)
    scores = []
    for _ in range(20):
        sequence.pool.insert(0, (8,))
        proposal = sequence.propose((), 4)
        assert proposal.tokens == (8,)
        scores.append(proposal.path_logprobs[0])
        sequence.observe(Observation((9,), (), (), (9,), ()))
        sequence.observe(Observation((0,), (), (), (0,), ()))
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < scores[0] - 1.0


def test_jacobi_iterations_alone_find_what_the_text_has_not_shown_yet() -> None:
    def target(text: Sequence[int]) -> int:
        return (text[-1] * 5 + 3) % 64  # 64 tokens come before one comes again

    def accepted_in_64_tokens(window: int) -> int:
        sequence = opened([0, 40, 9, 22, 51, 17], window=window, ngram=4, learns_text=False)
        played = play(sequence, [0, 40, 9, 22, 51, 17], target, num_new=60, budget=WHOLE)
        return sum(accepted for _, accepted in played.rounds)

    assert accepted_in_64_tokens(window=8) > 20
    assert accepted_in_64_tokens(window=8) > accepted_in_64_tokens(window=1)


def test_text_that_repeats_itself_is_accepted_well() -> None:
    verse = random.Random(3).sample(range(100), 40)

    def target(text: Sequence[int]) -> int:
        return verse[(verse.index(text[-1]) + 1) % 40]

    played = play(LookaheadWriter(EngineSettings(), 100).open(verse), verse, target, num_new=200, budget=16)
    late = [accepted for _, accepted in played.rounds[2:]]
    assert sum(late) / len(late) == 3, "each n-gram brings its three tokens"


def test_a_proposal_that_was_never_run_or_never_made_is_no_matter() -> None:
    sequence = opened([1, 2, 3, 1, 2, 3, 1])
    first = sequence.propose((), 16)
    assert sequence.propose((), 16) == first
    sequence.observe(run(NO_NODES, [1, 2, 3, 1, 2, 3, 1], lambda text: 2))
    sequence.observe(run(NO_NODES, [1, 2, 3, 1, 2, 3, 1, 2], lambda text: 3))
    assert_well_formed(sequence.propose((), 16), 16)
