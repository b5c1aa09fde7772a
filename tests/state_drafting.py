"""A writer of rows of tokens and states, driven by hand, with what each of its passes gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from card import LLM, SamplingParams
from card.errors import CardError
from card.family.states.sequence import StateSequence
from card.family.states.writer import StateWriter, make_writer
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.tree.nodes import NewNodes
from tests.drafts import draft_spec
from tests.pair import make_tokenizer

TEXT = [17, 30, 211, 5, 5, 90, 133, 64, 200]
PROMPTS = ["the cat", "one two three", "the mat and the other cat sat there", "five"]


class Reference(Protocol):
    """What other code makes of the same weights."""

    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the target's states that a drafter reads, [T, layers * D]."""

    def draft(
        self, text: Sequence[int], candidates: Sequence[int], first: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return logits [V] and state [D] behind a text and behind each candidate.

        Args:
            first: place of the first token that is read.
        """


def assert_close(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    """Compare numbers to a hundred-thousandth of the largest; what is minus infinity is so in both."""
    numbers, is_finite = expected.numpy(), torch.isfinite(expected).numpy()
    assert (np.isfinite(found) == is_finite).all()
    assert np.abs(found[is_finite] - numbers[is_finite]).max() <= 1e-5 * np.abs(numbers[is_finite]).max()


class Drafting:
    """A writer over the drafter of a target, with what each of its passes gave."""

    def __init__(
        self,
        target_name: str,
        load: Callable[[RowRunner, DecoderModel], DecoderModel],
        checkpoint: Reference,
        **spec: Any,
    ) -> None:
        """Load a target, then its drafter by ``load``, which is given the target's runner and weights."""
        self.checkpoint = checkpoint
        model = load_decoder(target_name, dtype="float32")
        assert isinstance(model, DecoderModel)
        target = plain_runner(model, max_model_len=256)
        runner = plain_runner(load(target, model), max_model_len=256)
        writer = make_writer(runner, target=target, find_grammar=None)
        assert isinstance(writer, StateWriter)
        self.writer, self._forward = writer, runner.forward
        self.spec = draft_spec(vocab_size=0, beam_width=1, branch=1, lead=8, **spec)
        self.passes: list[list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]] = []
        runner.forward = self._noted  # type: ignore[method-assign]

    def _noted(self, extensions: Sequence[Any]) -> list[Any]:
        logits = self._forward(extensions)
        states = [self.writer.runner.features.of(i, self.writer.own_states) for i in range(len(extensions))]
        self.passes.append([(one.copy(), own.copy()) for one, own in zip(logits, states, strict=True)])
        return logits

    def open(self, text: Sequence[int]) -> StateSequence:
        return self.writer.open(text, self.spec, epoch=0)

    def show(self, sequence: StateSequence, text: Sequence[int], first: int = 0) -> None:
        """Show the states behind the tokens of a text from a place on."""
        sequence.read(first, self.checkpoint.states(text)[first:].numpy())

    def step(self, *sequences: StateSequence, most: int = 256) -> list[NewNodes]:
        grown = self.writer.step([(one, most) for one in sequences])
        for one in grown:
            assert not isinstance(one, CardError), one
        return [one for one in grown if not isinstance(one, CardError)]

    def path(self, sequence: StateSequence) -> list[int]:
        """Return the tokens of the chain below the root."""
        cache = sequence.cache
        return [cache.token(node) for node in cache.best_path(cache.root_id, 99)]

    def assert_last(self, which: int, logits: torch.Tensor, state: torch.Tensor) -> None:
        """Compare what the last row of a sequence gave in the last pass."""
        found, own = self.passes[-1][which]
        assert_close(found[-1], logits)
        assert_close(own[-1], state)


def assert_rounds_are_right(drafting: Drafting, num_accepted: int) -> None:
    """Draft for three rounds, in each of which so many candidates are accepted, and compare all numbers."""
    checkpoint = drafting.checkpoint
    sequence, text = drafting.open(TEXT), list(TEXT)
    drafting.show(sequence, text)
    assert sequence.frontier() == [], "the states of a prompt come with its first commit"
    new_ids = [7]
    for _ in range(3):  # rejected at a depth, each time
        sequence.commit(new_ids)
        text += new_ids
        for _ in range(4):
            drafting.step(sequence)
            chain = drafting.path(sequence)[:-1]
            drafting.assert_last(0, *checkpoint.draft(text, chain)[-1])
        chain = drafting.path(sequence)
        new_ids = [*chain[:num_accepted], (chain[num_accepted] + 1) % 300]
        drafting.show(sequence, [*text, *new_ids[:-1]], len(text) - 1)


def assert_nodes_have_states_of_their_parents(drafting: Drafting) -> None:
    """Compare the logits and states of two layers of a tree with those of the path to each node."""
    drafting.spec = draft_spec(vocab_size=0, beam_width=3, branch=3, lead=4, growth="layer")
    sequence = drafting.open(TEXT)
    drafting.show(sequence, TEXT)
    sequence.commit([7])
    drafting.step(sequence)
    for _ in range(2):
        paths = [sequence.cache.path_tokens(node) for node in sequence.frontier()]
        assert len(paths) == 3
        drafting.step(sequence)
        for row, path in enumerate(paths):
            logits, state = drafting.checkpoint.draft([*TEXT, 7], path)[-1]
            assert_close(drafting.passes[-1][0][0][row], logits)
            assert_close(drafting.passes[-1][0][1][row], state)


def assert_all_is_accepted(target: str, draft: str, method: str) -> None:
    """Check what a drafter does that is always right: the next token is one more than the last."""
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    settings: dict[str, Any] = {"num_speculative_tokens": 4, "policy": "fixed", "max_model_len": 200}
    vocab_size = len(make_tokenizer())
    with LLM(target, draft, method=method, placement="inline", dtype="float32", **settings) as llm:
        outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        (first, *others), stats = output.outputs[0].token_ids, output.stats
        assert others == [(first + i + 1) % vocab_size for i in range(40)]
        assert stats.accepted_tokens == stats.verified_tokens
        assert stats.mean_acceptance_length == pytest.approx(5.0)


def plain_texts(target: str, params: SamplingParams, dtype: str = "float32") -> list[Any]:
    """Return what a target writes without a drafter."""
    with LLM(target, dtype=dtype, max_model_len=200, method="vanilla") as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def assert_texts_are_plain(target: str, draft: str, *, method: str, placement: Any, temperature: float) -> None:
    """Compare texts, of several prompts at once and of one, with those of the target alone."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "policy": "fixed"}
    expected = plain_texts(target, params)
    with LLM(target, draft, method=method, placement=placement, **settings) as llm:
        outputs = llm.generate(PROMPTS, params)
        alone = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert alone == expected[0]
    assert sum(output.stats.verified_tokens for output in outputs) or placement == "thread"  # which may come too late
