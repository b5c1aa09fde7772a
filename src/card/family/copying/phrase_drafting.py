"""Draft phrase by phrase: the draft model verifies guesses of its own next tokens, several in one pass.

Below the end of the drafted chain, each pass runs phrases from a pool and a window of Jacobi iterations, as lookahead
decoding does with a target. If a phrase is what the draft model would write, the chain grows by more than one token.
The pool belongs to the writer, so that a request begins with the phrases of earlier requests.

Source: Ouroboros, arXiv:2402.13720.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.draft_shaping import FindGrammar
from card.drafting.growth import Found
from card.drafting.local.protocol import Observation
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftWriter
from card.family.copying.guesses import children_of, paths_to
from card.family.copying.lookahead import LookaheadSequence
from card.family.copying.phrases import new_pool
from card.models.protocol import Extension, LanguageModel
from card.models.runner import RowRunner
from card.tree.logits import Logits, as_array
from card.tree.nodes import NO_NODES, ROOT, NewNodes, Nodes

PHRASES = "phrases"  # the growth rule that selects this writer
_WINDOW = 4  # columns of the window
_MOST_GUESSES = 40  # of a pass: the window takes up to half


class PhraseDraftSequence(BeamSequence):
    """The chain of one request. Guesses have rows during a pass; correct guesses keep them."""

    reads_whole_texts = True

    def __init__(self, writer: PhraseDraftWriter, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> None:
        """Take a sequence of the writer's pool. Raises: CapacityError if it has no room."""
        super().__init__(writer, token_ids, spec, epoch=epoch)
        self._max_model_len = writer.max_model_len
        pool = writer.phrases
        self._lookahead = LookaheadSequence(token_ids, window=_WINDOW, ngram=pool.length, pool=pool)
        self._guesses: Nodes | None = None  # of the next pass; None: not made yet

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Commit tokens as `BeamSequence.commit` does; phrases that end in them go into the pool."""
        self._guesses = None
        made = super().commit(token_ids)
        self._lookahead.pool.learn_text(self.token_ids[1 - self._lookahead.pool.length - len(token_ids) :])
        return made

    def num_tokens_to_run(self) -> int:
        """Return how many tokens must be run to expand the frontier, guesses included."""
        num_tokens = super().num_tokens_to_run()
        return num_tokens + len(self._asked(self.frontier(), num_tokens)) if num_tokens else 0

    def extension(self, frontier: Sequence[int], max_tokens: int) -> Extension:
        """Return at most ``max_tokens`` tokens to run: text, or the end of the chain, and guesses below it."""
        copied = super().extension(frontier, max_tokens)
        num_own, is_text_left = len(copied.token_ids), self._num_tokens(frontier) > len(copied.token_ids)
        guesses = NO_NODES if is_text_left else self._asked(frontier, num_own).leading(max_tokens - num_own)
        self._guesses = guesses
        first = self._model.num_rows(self.slot) + num_own
        parents = [first + parent if parent != ROOT else first - 1 for parent in guesses.parents]
        return replace(copied, token_ids=[*copied.token_ids, *guesses.tokens], parents=[*copied.parents, *parents])

    def grow(self, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Process the logits of a pass; make a node of each consecutive token that the draft model chose."""
        guesses, self._guesses = self._guesses, None
        if not guesses:
            return super().grow(frontier, logits)
        node, start = frontier[0], self._model.num_rows(self.slot) - len(guesses)
        first = self.root_position + self.spec.num_hidden + 1 + self.cache.depth_of(node)
        path = self.cache.path_tokens(node)
        shaped: Logits = as_array(logits)[:, : self._vocab_size]
        paths = [path, *([*path, *below] for below in paths_to(guesses))]
        if self._shaping is not None:
            shaped = self._shaping.apply(shaped, paths)
        positions = [first + len(below) - len(path) for below in paths]
        tokens, logprobs = self._scorer.top(shaped, positions, self.spec.shape.branch)
        layers, came_true = self._grow_chain(node, start, guesses, tokens, logprobs)
        self._model.keep(self.slot, start, [start + idx for idx in came_true])
        if not self._is_shared and self.num_committed_rows == len(self.token_ids):
            self._is_shared = True
            self._pool.note(self.slot, self.token_ids)
        new_ids = [self.cache.token(made) for layer in layers for made in layer.ids[:1]]
        if new_ids:
            choices = tuple([row[0] for row in tokens])
            seen = Observation(tuple(new_ids), guesses.tokens, guesses.parents, choices, tuple(came_true))
            self._lookahead.observe(seen)
        return NewNodes.joined(layers)

    def _grow_chain(
        self,
        node: int,
        start: int,
        guesses: Nodes,
        tokens: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]],
    ) -> tuple[list[NewNodes], list[int]]:
        """Expand a node that was run, and each of its children that was guessed.

        Args:
            start: row of the first guess.
        Returns: the layers; the guesses that got children, whose rows are kept in this order.
        """
        if node == self.cache.root_id:
            self.num_committed_rows = start
        else:
            self.row_of[node] = start - 1
        child_of, at = children_of(guesses), ROOT
        layers, came_true = list[NewNodes](), list[int]()
        while True:
            self._frontier = None
            layers.append(self._growth.grow(self.growing, Found([node], [tokens[at + 1]], [logprobs[at + 1]])))
            if len(layers[-1].ids) != 1 or self.cache.depth_of(layers[-1].ids[0]) >= self.num_layers:
                break
            node = layers[-1].ids[0]
            guessed = child_of.get((at, self.cache.token(node)))
            if guessed is None:
                break
            self.row_of[node] = start + len(came_true)
            came_true.append(guessed)
            at = guessed
        return layers, came_true

    def _asked(self, frontier: Sequence[int], num_own: int) -> Nodes:
        """Return the guesses of the next pass, limited by free rows and positions."""
        if self._guesses is None:
            self._guesses = NO_NODES
            room = self._model.capacity(self.slot) - self._model.num_rows(self.slot) - num_own
            if len(frontier) == 1 and room > 0:  # a beam of several paths gets no guesses
                depth = self.cache.depth_of(frontier[0])
                text = [*self.token_ids[-self._lookahead.pool.length :], *self.cache.path_tokens(frontier[0])]
                self._lookahead.move_to(text)
                proposed = self._lookahead.propose((), min(room, _MOST_GUESSES))
                deepest = self._max_model_len - 1 - self.root_position - depth  # there is no position after it
                depths = tuple([len(path) for path in paths_to(proposed)])
                proposed = msgspec.structs.replace(proposed, depths=depths)
                self._guesses = proposed.take([i for i, depth in enumerate(depths) if depth <= deepest])
        return self._guesses


class PhraseDraftWriter(BeamWriter):
    """Runs a pass of the draft model for several requests: a layer of a beam, or several tokens of a chain."""

    def __init__(
        self, model: LanguageModel, kv_cache_bytes: int | None = None, *, find_grammar: FindGrammar | None = None
    ) -> None:
        """Make a writer of ``model``; arguments as of `BeamWriter`."""
        super().__init__(model, kv_cache_bytes, find_grammar=find_grammar)
        self.phrases = new_pool()

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> BeamSequence:
        """Start the tree of a request after its text. Raises: CapacityError if there is no room."""
        if self.fitting(spec).shape.growth == PHRASES:
            return PhraseDraftSequence(self, token_ids, spec, epoch=epoch)
        return super().open(token_ids, spec, epoch=epoch)


def make_writer(model: LanguageModel, kv_cache_bytes: int | None = None, **asked: Any) -> DraftWriter | None:
    """Return a writer that can draft by phrases; None for a model whose passes are of another kind.

    Args:
        asked: as of `card.drafting.draft_writers.make_writer`.
    """
    is_ordinary = asked["parallel"] is None
    if isinstance(model, RowRunner):
        is_ordinary = is_ordinary and not model.has_recorded_passes and model.block_inputs is None
    return PhraseDraftWriter(model, kv_cache_bytes, find_grammar=asked["find_grammar"]) if is_ordinary else None
