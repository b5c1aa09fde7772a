"""Draft with a whole language model on its KV cache: each pass adds one layer to the trees of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from card.drafting.draft_shaping import FindGrammar
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftSequence, DraftWriter
from card.drafting.window import MOST_READ, num_skipped, read_part
from card.errors import CapacityError, CardError, ModelError, in_words
from card.machine.memory import free_memory
from card.models.protocol import NO_PARENT, Extension, LanguageModel, Recurrent, sequence_bytes
from card.models.rows.pool import SequencePool
from card.tree.logits import Logits
from card.tree.nodes import NewNodes

# A writer's default memory is that of so many texts of full length, but no larger share of what is free. The target's
# rows may take a quarter, and are larger.
_DEFAULT_NUM_SEQUENCES, _DEFAULT_SHARE = 16, 1 / 16


class BeamSequence(DraftSequence):
    """The beam of one request, with the draft model's KV row of each text token that it reads and each expanded node.

    Rows 0 .. num_committed_rows - 1 hold the text (without its last tokens if those were not run yet); after them come
    the rows of expanded nodes. Of a long text only the beginning and the end are read.
    """

    reads_whole_texts = False

    def __init__(self, writer: BeamWriter, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> None:
        """Allocate a sequence in the writer's pool. Raises: CapacityError if there is no room."""
        super().__init__(writer, token_ids, writer.fitting(spec), epoch=epoch)
        self._fitting = writer.fitting
        self._pool = writer.pool
        self._model = writer.model
        self.num_rows = writer.rows_of(spec)
        self.row_of: dict[int, int] = {}  # expanded nodes below the root
        self._open()

    def _open(self) -> None:
        """Take rows for the part of the text that is read. Raises: CapacityError if there is no room."""
        self._num_skipped = self._num_to_skip()
        # A draft need not be exact: from the start its rows suit the text's final length.
        opened = self._pool.open(self._keys, self.num_rows, text_len=self._text_limit)
        self.slot, self.num_reused = opened.slot, opened.num_reused
        self.num_committed_rows = opened.num_reused
        self._is_shared = False  # other texts can copy the rows of this text

    def _num_to_skip(self) -> int:
        """Return how many tokens of the text are not read, as it is opened."""
        return 0 if self.reads_whole_texts else num_skipped(len(self.token_ids))

    @property
    def _keys(self) -> Sequence[int]:
        """Numbers for the tokens that are read, by which the pool finds texts with the same rows."""
        return self._read_ids

    @property
    def _read_ids(self) -> Sequence[int]:
        """The part of the text that is read."""
        return read_part(self.token_ids, self._num_skipped)

    @property
    def _num_unread(self) -> int:
        return len(self.token_ids) - self._num_skipped - self.num_committed_rows

    def close(self) -> None:
        """Free the sequence; the rows of the text stay in the pool for a text that begins with it."""
        self._pool.close(self.slot, self._keys[: self.num_committed_rows])

    def discard(self) -> None:
        """Free the sequence after a failed pass; no other text may reuse its rows."""
        self._pool.close(self.slot)

    def reshape(self, *, beam_width: int | None = None, branch_below: float | None = None) -> None:
        """Change the shape as far as the model supports it; arguments as in `DraftSequence.reshape`."""
        super().reshape(beam_width=beam_width, branch_below=branch_below)
        self.spec = self._fitting(self.spec)

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Commit tokens as `DraftSequence.commit` does, and keep the rows of the remaining nodes."""
        path = self.cache.walk(token_ids)
        made = super().commit(token_ids)
        path_rows = [self.row_of[node] for node in path if node in self.row_of]
        survivors = sorted(
            (row, node)
            for node, row in self.row_of.items()
            if made is not None and self.cache.is_alive(node) and node not in path
        )
        self._model.keep(self.slot, self.num_committed_rows, path_rows + [row for row, _ in survivors])
        self.num_committed_rows += len(path_rows)
        self.row_of = {node: self.num_committed_rows + i for i, (_, node) in enumerate(survivors)}
        return made

    def frontier(self) -> list[int]:
        """Return the nodes that the next pass would expand; empty if none is worth it or there is no room."""
        if self._frontier is None:
            nodes = self._growth.frontier(self.growing)
            if self._num_unread > MOST_READ and not self.reads_whole_texts:
                self._pool.close(self.slot)  # so much was written without this drafter that it begins again behind it
                self._open()
            room = self._model.capacity(self.slot) - self._model.num_rows(self.slot)
            if self._num_tokens(nodes) > room:
                is_whole = self._growth.is_run_whole or self.cache.root_id in nodes
                nodes = [] if is_whole else nodes[:room]
            self._frontier = nodes
        return self._frontier

    def num_tokens_to_run(self) -> int:
        """Return how many tokens must be run to expand the whole frontier."""
        return self._num_tokens(self.frontier())

    def _num_tokens(self, frontier: Sequence[int]) -> int:
        return self._num_unread if self.cache.root_id in frontier else len(frontier)

    def extension(self, frontier: Sequence[int], max_tokens: int) -> Extension:
        """Return at most ``max_tokens`` tokens to run: unread text first, else the first nodes of ``frontier``.

        The rows with logits are those that `grow` expects.
        """
        start = self.num_committed_rows
        if self.cache.root_id in frontier:  # a root that was not run has no nodes below it
            chain = self._read_ids[start : start + max_tokens]
            parents = [start + i - 1 if start + i else NO_PARENT for i in range(len(chain))]
            first_logits_idx = len(chain) - (len(chain) == self._num_unread)  # none where more is to be read
            return Extension(self.slot, chain, parents, first_logits_idx)
        root_row = start - 1
        nodes = frontier[:max_tokens]
        parent_rows = [self.row_of.get(self.cache.parent(node), root_row) for node in nodes]
        return Extension(self.slot, [self.cache.token(node) for node in nodes], parent_rows)

    def grow(self, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Add the logits and rows of one pass over the first nodes of ``frontier``.

        Returns: the new nodes; none if part of the text is still unread.
        Raises: ProtocolError if the logits are not numbers under this spec.
        """
        self._frontier = None
        num_rows = self._model.num_rows(self.slot)
        if self.cache.root_id in frontier:
            self.num_committed_rows = num_rows
            if self._num_unread:
                return NewNodes.none()
            if not self._is_shared:
                self._is_shared = True
                self._pool.note(self.slot, self._keys)
        else:
            frontier = frontier[: len(logits)]
            first_row = num_rows - len(frontier)
            self.row_of.update((node, first_row + i) for i, node in enumerate(frontier))
        return super().grow(frontier, logits)


class BeamWriter(DraftWriter):
    """Adds one layer to the beams of several requests in each pass of the draft model."""

    def __init__(
        self, model: LanguageModel, kv_cache_bytes: int | None = None, *, find_grammar: FindGrammar | None = None
    ) -> None:
        """Use ``model``; its KV rows get at most ``kv_cache_bytes``; None: a share of the free memory.

        Args:
            find_grammar: None ignores grammars.
        Raises: SettingsError if the memory is too small for any sequence.
        """
        super().__init__(model.vocab_size, model.max_model_len, find_grammar=find_grammar)
        self.model = model
        self._drafts_chains_only = isinstance(model, Recurrent)
        of_one = sequence_bytes(model, model.max_rows)
        usual_bytes = max(of_one, min(_DEFAULT_NUM_SEQUENCES * of_one, int(_DEFAULT_SHARE * free_memory())))
        self.pool = SequencePool(model, kv_cache_bytes or usual_bytes)

    def fitting(self, spec: DraftSpec) -> DraftSpec:
        """Return a spec that the model can run: a model that runs only chains drafts the likeliest chain."""
        if not self._drafts_chains_only:
            return spec
        return msgspec.structs.replace(spec, shape=replace(spec.shape, growth="layer", beam_width=1, branch=1))

    def has_room(self, spec: DraftSpec, *, num_lent: int = 0) -> bool:
        """Return whether `open` would find room for a request of this spec now; see `SequencePool.has_room`."""
        return self.pool.has_room(self.rows_of(spec), num_lent=num_lent)

    def rows_of(self, spec: DraftSpec) -> int:
        """Return the KV rows of a beam of this spec."""
        return self.text_limit(spec) + self.model.max_rows - self.model.max_model_len

    def can_ever_hold(self, spec: DraftSpec) -> bool:
        """Return whether a request of this spec fits into the memory on its own."""
        return self.pool.can_ever_hold(self.rows_of(spec))

    def check(self) -> None:
        """Run one token. Raises: any error of the model; nothing if there is no memory to try it."""
        try:
            slot = self.model.open(1)
        except CapacityError:
            return
        try:
            self.model.forward([Extension(slot, [0], [NO_PARENT])])
        finally:
            self.model.close(slot)

    def open(self, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int) -> BeamSequence:
        """Start the beam of a request after its text. Raises: CapacityError if there is no room."""
        return BeamSequence(self, token_ids, spec, epoch=epoch)

    def grow(self, place: int, beam: BeamSequence, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Add what the last pass has left of a beam, whose extension had this place among all; see its `grow`."""
        return beam.grow(frontier, logits)

    def step(self, work: Sequence[tuple[Any, int]]) -> list[NewNodes | CardError]:
        """Expand each beam's frontier, in one pass; arguments and result as in `DraftWriter.step`."""
        frontiers = [beam.frontier() for beam, _ in work]
        extensions = [beam.extension(frontier, share) for (beam, share), frontier in zip(work, frontiers, strict=True)]
        all_logits = self.model.forward(extensions)
        grown: list[NewNodes | CardError] = []
        for place, ((beam, _), frontier, logits) in enumerate(zip(work, frontiers, all_logits, strict=True)):
            try:
                grown.append(self.grow(place, beam, frontier, logits))
            except CardError as error:
                grown.append(error)
            except Exception as error:  # in torch or a growth rule: other beams have grown already
                grown.append(ModelError(in_words(error)))
        return grown
