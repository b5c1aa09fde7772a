"""Draft with a block or a head whose rows stand for a token and a state: row j has token j and the state before it.

States of the text come from the target's passes. Those of candidates are the block's own: it hands on the state of each
row. So rows of candidates are guesses, and every commit drops them; true ones are run with the next pass.

Rows that the target has copied from another text are not shown. The block then begins behind them, which it can, as its
rows turn by their distance alone. If only a few are missing behind others, it runs these with states of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from card.drafting.beam import BeamSequence, BeamWriter
from card.drafting.messages import DraftSpec
from card.drafting.protocol import DraftSequence
from card.kernels.number_types import Floats
from card.models.own.row_inputs import RowInputs
from card.models.protocol import Extension
from card.tree.logits import FloatArray, Logits
from card.tree.nodes import NewNodes

_MOST_BLANK = 64  # rows without a state behind others: a request ends some tokens before its drafter has read them


class StateSequence(BeamSequence):
    """The tree of one request. All of its text is read, from the first known state on."""

    reads_whole_texts = True

    def __init__(
        self, writer: BeamWriter, inputs: RowInputs, token_ids: Sequence[int], spec: DraftSpec, *, epoch: int
    ) -> None:
        """Take a sequence of the writer's pool. Raises: CapacityError if it has no room."""
        self._inputs = inputs
        super().__init__(writer, token_ids, spec, epoch=epoch)
        self._zeros: Floats = np.zeros(inputs.width, np.float32)
        # By place in the text: the state behind the token before.
        self._state_at: dict[int, Floats] = {} if self._inputs.first_place else {0: self._zeros}
        self._state_of: dict[int, Floats] = {}  # the block's own behind a node that was run
        self._waits = True  # the states of a prompt come with the first commit

    def _num_to_skip(self) -> int:
        return self._inputs.first_place

    @property
    def _keys(self) -> Sequence[int]:
        """Those of tokens. If the first token is not read, rows depend on it all the same, by the states.

        States of a text with images depend on these, which the drafter does not know: it shares no rows.
        """
        if self.spec.num_hidden:
            return ()
        ids = self._read_ids
        if not self._num_skipped or not ids:
            return ids
        return [-1 - (self.token_ids[0] << 32 | ids[0]), *ids[1:]]

    @property
    def _read_ids(self) -> Sequence[int]:
        """The part of the text that is read."""
        return self.token_ids[self._num_skipped :] if self._num_skipped else self.token_ids

    @property
    def _next_place(self) -> int:
        """Place in the text of the next row."""
        return self._num_skipped + self.num_committed_rows

    def read(self, first: int, states: FloatArray) -> None:
        """Read the target's states of rows that became text, each with the token that followed."""
        states = states[max(0, self._next_place - first - 1) :]
        if len(states):
            place = max(first + 1, self._next_place)
            self._state_at.update(enumerate(self._inputs.fused(states), place))

    def commit(self, token_ids: Sequence[int]) -> NewNodes | None:
        """Commit tokens. The tree begins anew: its rows have states that were guessed."""
        self._waits = False
        if DraftSequence.commit(self, token_ids) is not None:
            self.num_dropped += self.cache.num_nodes
            self.cache.restart(self.cache.epoch + 1)
        self._model.keep(self.slot, self.num_committed_rows)
        self.row_of.clear()
        self._state_of.clear()
        return None

    def frontier(self) -> list[int]:
        """Return the nodes that the next pass would expand; empty also while a state of the text is missing."""
        if self._waits or (self._frontier is None and not self._has_states()):
            return []
        return super().frontier()

    def _has_states(self) -> bool:
        """Return whether the unread text has states, once it begins where they do."""
        first, end, known = self._next_place, len(self.token_ids), self._state_at
        if end <= self._num_skipped:
            return False
        begin = next((place + 1 for place in reversed(range(first, end)) if place not in known), first)
        if begin >= end > first:
            return False  # not even the newest token has one
        if begin == first:
            return True
        if self.num_committed_rows and begin - first <= _MOST_BLANK:
            known.update((place, self._zeros) for place in range(first, begin) if place not in known)
        else:
            self._begin_at(begin)
        return True

    def _begin_at(self, place: int) -> None:
        """Let the token at this place be the first one that is read. No other text can use such rows."""
        self._pool.note(self.slot, ())
        self._is_shared = True
        self._model.keep(self.slot, 0)
        self.num_committed_rows, self._num_skipped = 0, place

    def extension(self, frontier: Sequence[int], max_tokens: int) -> Extension:
        """Return tokens to run as `BeamSequence.extension` does, each with its state."""
        plain = super().extension(frontier, max_tokens)
        if self.cache.root_id in frontier:
            first = self._next_place
            states = [self._state_at[first + i] for i in range(len(plain.token_ids))]
        else:
            states = [self._state_of[self.cache.parent(node)] for node in frontier[:max_tokens]]
        return replace(plain, inputs=self._inputs.rows(plain.token_ids, np.stack(states)))

    def hand_on(self, frontier: Sequence[int], states: Floats) -> None:
        """Take the block's own states behind rows that had logits, before `grow`; none where more is unread."""
        nodes = ([self.cache.root_id] if self.cache.root_id in frontier else frontier)[: len(states)]
        handed_on = self._inputs.handed_on(np.array(states), [self.cache.depth_of(node) for node in nodes])
        self._state_of.update(zip(nodes, handed_on, strict=True))

    def grow(self, frontier: Sequence[int], logits: Logits) -> NewNodes:
        """Add the rows of a pass as `BeamSequence.grow` does, and forget the states that they were made of."""
        first = self._next_place
        made = super().grow(frontier, logits)
        for place in range(first, self._next_place):
            self._state_at.pop(place, None)
        return made

    def close(self) -> None:
        """Free the sequence; its rows stay in the pool if they are those of a text from its beginning."""
        if self._num_skipped > self._inputs.first_place:
            self.discard()
        else:
            super().close()
