"""CARD's drafter: trees of a draft model's candidates, grown pass by pass, several requests in one call."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from torch import Tensor

from card.config import Grammar, ShapingRule
from card.errors import CapacityError, CardError, ModelError, TargetError, in_words
from card.models.pool import SequencePool
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.models.torch_runner import TorchRunner
from card.tree.candidates import CandidateCache
from card.tree.messages import DraftSpec
from card.tree.nodes import NewNodes
from card.tree.sampling import CandidateScorer
from card.tree.shaping import GrammarState, Path, Shaping
from card.writers.growth import RULES, Found, GrowingTree

logger = logging.getLogger(__name__)

FindGrammar = Callable[[Grammar], GrammarState | None]
"""Returns the beginning of a grammar; None if there is none here, or not yet."""


class DraftShaping:
    """Follows one text. It is a help and no more: a grammar that is not there, or breaks, is left out."""

    def __init__(self, rule: ShapingRule, token_ids: Sequence[int], vocab_size: int, find: FindGrammar | None) -> None:
        """Begin with a text.

        Args:
            find: is asked for the grammar until there is one; None: there never is.
        """
        self._rule = rule
        self._vocab_size = vocab_size
        self._find = find if rule.grammar is not None else None
        self._shaping = Shaping(rule, token_ids, vocab_size)
        self._token_ids = list(token_ids)

    def commit(self, new_ids: Sequence[int]) -> None:
        """Take committed tokens."""
        self._token_ids += new_ids
        self._shaping.commit(new_ids)

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Return the shaped logits, see `Shaping.apply`; a row in which nothing would be left stays as it is."""
        self._look_for_the_grammar()
        try:
            shaped = self._shaping.apply(logits, paths)
        except TargetError as error:
            logger.warning("drafting goes on without the grammar of a request: %s", error)
            self._shaping = Shaping(self._rule, self._token_ids, self._vocab_size)
            shaped = self._shaping.apply(logits, paths)
        is_empty = shaped.isneginf().all(-1, keepdim=True)
        return logits.to(shaped).where(is_empty, shaped) if is_empty.any() else shaped

    def _look_for_the_grammar(self) -> None:
        if self._find is None or self._rule.grammar is None:
            return
        grammar = self._find(self._rule.grammar)
        if grammar is not None:
            self._find = None
            self._shaping = Shaping(self._rule, self._token_ids, self._vocab_size, grammar)


_DEFAULT_NUM_SEQUENCES = 16  # of full length, in the memory that a writer takes if not told how much


class BeamSequence:
    """The beam of one request: committed text, candidate tree, and which KV row holds which node.

    Rows 0 .. num_committed_rows - 1 hold the text (without its last tokens if those were not run yet); after them come
    the rows of expanded nodes. The root of the tree is the last committed token.
    """

    num_rows: int
    """KV rows that it has room for."""
    num_reused: int
    """Tokens of the text whose rows the pool had already: they are not run again."""
    num_dropped: int
    """Nodes that commits have ruled out so far."""
    num_rolled_back: int
    """Of these, those that lay on the most probable path of their tree."""

    def __init__(
        self,
        model: LanguageModel,
        pool: SequencePool,
        token_ids: Sequence[int],
        spec: DraftSpec,
        *,
        epoch: int,
        find_grammar: FindGrammar | None = None,
    ) -> None:
        """Take a sequence of the model's pool. Raises: CapacityError if it has no room."""
        self.spec = spec
        self.num_dropped = self.num_rolled_back = 0
        self.token_ids = list(token_ids)
        self.cache = CandidateCache(max_nodes=spec.shape.max_nodes, lead=spec.shape.lead)
        self.cache.restart(epoch)
        self._pool = pool
        self._model = model
        self._vocab_size = min(spec.vocab_size or model.vocab_size, model.vocab_size)  # both models have these tokens
        self._scorer = CandidateScorer(spec.sampling, self._vocab_size, coupled=spec.shape.coupled_noise)
        self._shaping: DraftShaping | None = None
        if spec.shaping is not None:
            self._shaping = DraftShaping(spec.shaping, self.token_ids, self._vocab_size, find_grammar)
        self._growth = RULES[spec.shape.growth]
        self.num_rows = rows_of(spec, model)
        # What is drafted need not be exact: the rows are those of the text's end from its beginning.
        opened = pool.open(self.token_ids, self.num_rows, text_len=text_limit(spec, model))
        self._slot, self.num_reused = opened.slot, opened.num_reused
        self._num_committed_rows = opened.num_reused
        self._is_shared = False  # whether others can copy the rows of the text
        self._row_of: dict[int, int] = {}  # expanded nodes below the root
        self._frontier: list[int] | None = None  # as long as nothing changes; to find it takes a look at every node

    @property
    def root_position(self) -> int:
        """Absolute position of the root's token."""
        return len(self.token_ids) - 1

    @property
    def _num_layers(self) -> int:
        """Depth below the root from which on nodes are not expanded: lead, or they have no successor position."""
        return min(self.cache.lead, text_limit(self.spec, self._model) - 1 - self.root_position)

    @property
    def _growing(self) -> GrowingTree:
        return GrowingTree(self.cache, self.spec.shape, self._num_layers)

    def close(self) -> None:
        """Give the sequence back; the rows of the text stay in the pool for a text that begins with it."""
        self._pool.close(self._slot, self.token_ids[: self._num_committed_rows])

    def discard(self) -> None:
        """Give the sequence back after a failed pass; no other text is to be lent its rows."""
        self._pool.close(self._slot)

    def reshape(self, *, beam_width: int | None = None, branch_below: float | None = None) -> None:
        """Change the width of layers and what counts as unsure; None leaves one as it is.

        Frontiers obey at once. Nodes that the new shape wants of what is known already are made by the next commit or
        pass: whoever changes the shape commits tokens with it, and the tree below them is made anew anyway.
        """
        told = {"beam_width": beam_width, "branch_below": branch_below}
        changes: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        self.spec = msgspec.structs.replace(self.spec, shape=replace(self.spec.shape, **changes))
        self._frontier = None

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Append committed tokens, re-root there, drop what died and widen the tree from the secondary tier.

        Returns: the nodes that came from the secondary tier; None for a miss, after which a new epoch has begun.
        """
        self._frontier = None
        path = self.cache.walk(token_ids)
        path_rows = [self._row_of[node] for node in path if node in self._row_of]
        num_left = self.cache.num_nodes - len(path)
        self.num_rolled_back += self.cache.num_rolled_back(token_ids)
        self.cache.advance(token_ids)
        self.num_dropped += num_left - self.cache.num_nodes
        revived = (
            self.cache.refill(1, -math.inf) if self.cache.pending else NewNodes.none()
        )  # was it left out of the beam?
        is_hit = not self.cache.pending
        if not is_hit:
            self.cache.restart(self.cache.epoch + 1)
        self.token_ids += token_ids
        if self._shaping is not None:
            self._shaping.commit(token_ids)
        survivors = sorted(
            (row, node)
            for node, row in self._row_of.items()
            if is_hit and self.cache.is_alive(node) and node not in path
        )
        self._model.keep(self._slot, self._num_committed_rows, path_rows + [row for row, _ in survivors])
        self._num_committed_rows += len(path_rows)
        self._row_of = {node: self._num_committed_rows + i for i, (_, node) in enumerate(survivors)}
        if not is_hit:
            return None
        return revived if revived.ids else self._growth.widen(self._growing)

    def frontier(self) -> list[int]:
        """Return the nodes that the next pass would expand; empty if there is nothing worth doing or no room."""
        if self._frontier is None:
            nodes = self._growth.frontier(self._growing)
            room = self._model.capacity(self._slot) - self._model.num_rows(self._slot)
            if self.num_tokens(nodes) > room:
                is_whole = self._growth.is_run_whole or self.cache.root_id in nodes
                nodes = [] if is_whole else nodes[:room]
            self._frontier = nodes
        return self._frontier

    def num_tokens(self, frontier: Sequence[int]) -> int:
        """Return how many tokens must be run to expand the whole frontier."""
        return len(self.token_ids) - self._num_committed_rows if self.cache.root_id in frontier else len(frontier)

    def extension(self, frontier: Sequence[int], max_tokens: int) -> Extension:
        """Return at most ``max_tokens`` tokens to run: of text that was not run yet, else the first of ``frontier``.

        Logits are those that `grow` takes.
        """
        start = self._num_committed_rows
        if self.cache.root_id in frontier:  # a root that was not run yet has no nodes below it
            chain = self.token_ids[start : start + max_tokens]
            parents = [start + i - 1 if start + i else NO_PARENT for i in range(len(chain))]
            return Extension(self._slot, chain, parents, len(chain) - 1)
        root_row = start - 1
        nodes = frontier[:max_tokens]
        parent_rows = [self._row_of.get(self.cache.parent(node), root_row) for node in nodes]
        return Extension(self._slot, [self.cache.token(node) for node in nodes], parent_rows)

    def grow(self, frontier: Sequence[int], logits: Tensor) -> NewNodes:
        """Take the logits of one pass over the first nodes of ``frontier`` and make nodes of what they say.

        Returns: the new nodes; none if text is left to be run.
        Raises: ProtocolError if the model's scores are no numbers under this spec.
        """
        self._frontier = None
        num_rows = self._model.num_rows(self._slot)
        if self.cache.root_id in frontier:
            self._num_committed_rows = num_rows
            if num_rows < len(self.token_ids):
                return NewNodes.none()
            if not self._is_shared:
                self._is_shared = True
                self._pool.note(self._slot, self.token_ids)
        else:
            frontier = frontier[: len(logits)]
            first_row = num_rows - len(frontier)
            self._row_of.update((node, first_row + i) for i, node in enumerate(frontier))
        positions = [self.root_position + self.cache.depth_of(node) + 1 for node in frontier]
        logits = logits[:, : self._vocab_size]
        if self._shaping is not None:
            logits = self._shaping.apply(logits, [self.cache.path_tokens(node) for node in frontier])
        tokens, logprobs = self._scorer.top(logits, positions, self.spec.shape.branch)
        return self._growth.grow(self._growing, Found(frontier, tokens.tolist(), logprobs.tolist()))


class BeamWriter:
    """Runs one pass of the draft model for the beams of several requests."""

    def __init__(
        self, model: LanguageModel, kv_cache_bytes: int | None = None, *, find_grammar: FindGrammar | None = None
    ) -> None:
        """Take ``model``; its KV rows get at most ``kv_cache_bytes``, None: what a few sequences of full length take.

        Args:
            find_grammar: None drafts without regard to grammars.
        Raises: SettingsError if the memory is too small for any sequence.
        """
        self.model = model
        self._find_grammar = find_grammar
        self._pool = SequencePool(model, kv_cache_bytes or _DEFAULT_NUM_SEQUENCES * model.max_rows * model.row_bytes)

    def warm_up(self, spec: DraftSpec, num_rows: int) -> None:
        """Prepare steps of this spec for sequences of up to ``num_rows`` rows; here none needs it."""

    def has_room(self, spec: DraftSpec) -> bool:
        """Return whether `open` would find room for a request of this spec now."""
        return self._pool.has_room(self.rows_of(spec))

    def rows_of(self, spec: DraftSpec) -> int:
        """Return the KV rows that a beam of this spec takes."""
        return rows_of(spec, self.model)

    def can_ever_hold(self, spec: DraftSpec) -> bool:
        """Return whether a request of this spec fits into the memory if it is alone."""
        return self._pool.can_ever_hold(self.rows_of(spec))

    def check(self) -> None:
        """Run one token. Raises: what the model raises; nothing where there is no memory to try it."""
        try:
            slot = self.model.open(1)
        except CapacityError:
            return
        try:
            self.model.forward([Extension(slot, [0], [NO_PARENT])])
        finally:
            self.model.close(slot)

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> BeamSequence:
        """Start the beam of a request behind its text. Raises: CapacityError if there is no room."""
        return BeamSequence(self.model, self._pool, token_ids, spec, epoch=epoch, find_grammar=self._find_grammar)

    def step(
        self, beams: Sequence[tuple[BeamSequence, Sequence[int]]], max_tokens: Sequence[int] | None = None
    ) -> list[NewNodes | CardError]:
        """Grow each beam below its frontier, in one pass.

        Args:
            beams: each with its frontier, which is not empty.
            max_tokens: most tokens to run for each, 1 or more; None sets no limit.
        Returns: the new nodes of each; an error where nothing can be made of the scores, which are no numbers, say. It
            does no harm to the others.
        Raises: what the model raises; no beam has changed then.
        """
        shares = max_tokens or [beam.num_tokens(frontier) for beam, frontier in beams]
        extensions = [beam.extension(frontier, share) for (beam, frontier), share in zip(beams, shares, strict=True)]
        all_logits = self.model.forward(extensions)
        grown: list[NewNodes | CardError] = []
        for (beam, frontier), logits in zip(beams, all_logits, strict=True):
            try:
                grown.append(beam.grow(frontier, logits))
            except CardError as error:
                grown.append(error)
            except (RuntimeError, MemoryError) as error:  # of torch
                grown.append(ModelError(in_words(error)))
        return grown


def text_limit(spec: DraftSpec, model: LanguageModel) -> int:
    """Return the length beyond which a text of this spec is not drafted for: it ends there, or the model does."""
    return min(spec.max_len, model.max_model_len)


def rows_of(spec: DraftSpec, model: LanguageModel) -> int:
    """Return the most KV rows that a beam of this spec takes."""
    return text_limit(spec, model) + model.max_rows - model.max_model_len


def make_writer(
    model: TorchRunner,
    kv_cache_bytes: int | None = None,
    *,
    takes_turns: bool,
    find_grammar: FindGrammar | None = None,
) -> BeamWriter:
    """Return the writer that suits ``model``: one whose steps are recorded if its passes are, else a `BeamWriter`.

    Args:
        kv_cache_bytes: most memory for its KV rows; None: by the length of a sequence.
        takes_turns: the drafter works while the target waits, so that it must not work ahead.
        find_grammar: as of `BeamWriter`.
    """
    if not model.has_recorded_passes:
        return BeamWriter(model, kv_cache_bytes, find_grammar=find_grammar)
    from card.models.cuda.bucketed import BucketedRunner
    from card.writers.cuda.device_beam import DeviceBeamWriter

    assert isinstance(model, BucketedRunner)
    return DeviceBeamWriter(model, kv_cache_bytes, looks_ahead=not takes_turns, find_grammar=find_grammar)
