"""Models for tests: logits from a hash of the last few tokens, with the same row operations as a real KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from card.errors import CapacityError, ModelError, SettingsError, VocabularyError
from card.kernels.number_types import Floats
from card.models.protocol import NO_PARENT, Extension
from card.models.rows.row_tree import IntArray
from card.models.rows.selection import AttentionScores, ChosenRows

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # odd, near 2**64 / golden ratio: spreads consecutive numbers
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(value: int) -> int:
    """Return 64 well mixed bits of ``value``. Source: the finaliser of SplitMix64, Steele et al. 2014."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _hash(seed: int, context: tuple[int, ...]) -> int:
    key = _mix(seed & _MASK)
    for token_id in context:
        key = _mix(key ^ (token_id + 1))
    return key


def _uniforms(key: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return [count] float64 inside (0, 1), a function of ``key`` alone."""
    bits = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
    bits ^= bits >> np.uint64(31)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(slots=True)
class _Rows:
    """One sequence: its room, and token, parent row and position of each row."""

    capacity: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class TableModel:
    """A `LanguageModel` whose logits are a fixed pseudo-random function of the last ``order`` tokens of a path.

    Two models with the same arguments are the same function, in any process. It checks every argument, so that a
    caller's mistake raises instead of giving other logits. ``num_forward_passes`` and ``num_forward_tokens`` count.
    """

    def __init__(
        self,
        seed: int,
        vocab_size: int = 16,
        order: int = 2,
        *,
        spread: float = 2.0,
        max_model_len: int = 256,
        num_tree_rows: int = 64,
        max_slots: int | None = None,
        row_bytes: int = 1,
    ) -> None:
        """Make the model.

        Args:
            order: tokens of the path that the logits depend on, 1 or more.
            spread: scale of the logits; larger makes the likeliest token likelier.
            num_tree_rows: rows of a sequence beyond max_model_len.
            max_slots: most open sequences; None for no limit.
            row_bytes: memory that a row pretends to take.
        Raises: SettingsError for a number out of range.
        """
        counts = {"vocab_size": vocab_size, "order": order, "max_model_len": max_model_len, "row_bytes": row_bytes}
        for name, count in counts.items():
            if count < 1:
                raise SettingsError(f"{name} must be 1 or more, got {count}")
        self.seed, self.order, self.spread = seed, order, spread
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.max_rows, self._max_slots = max_model_len + num_tree_rows, max_slots
        self.row_bytes = row_bytes
        self._sequences: dict[int, _Rows] = {}
        self._next_slot = 0
        self._known: dict[tuple[int, ...], Floats] = {}
        self.num_forward_passes = 0
        self.num_forward_tokens = 0
        self.attention_scores = AttentionScores()
        self._of_few_rows: TableModel | None = None  # gives the logits of passes that read chosen rows

    def bytes_read(self, num_rows: int, reads: ChosenRows | None) -> int:
        """Return the bytes of KV that a pass reads of a sequence with ``num_rows`` rows, the new ones included."""
        return self.row_bytes * (num_rows if reads is None else reads.num_read(num_rows))

    @property
    def num_open(self) -> int:
        """Number of open sequences."""
        return len(self._sequences)

    def blend(self, other: TableModel, agreement: float) -> TableModel:
        """Return a model that is ``other`` in a share ``agreement`` of all contexts and opposes it in the rest.

        Which contexts is a hash of this model's seed. Where it opposes, it has its own logits, except that the first
        choice of ``other`` comes last. So 1 is ``other`` itself, and 0 never has its first choice.

        Raises: SettingsError for a share outside [0, 1] or where there is no other token to choose; VocabularyError
            if the vocabularies differ in size.
        """
        return _BlendedModel(self, other, agreement)

    def logits_after(self, token_ids: Sequence[int]) -> Floats:
        """Return [V] float32: the logits after a whole path of tokens, without any slot. Not to be written to."""
        context = tuple(token_ids[-self.order :])
        logits = self._known.get(context)
        if logits is None:
            logits = self._known[context] = self._make_logits(context)
        return logits

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence with room for ``max_rows`` rows (None: `max_rows` of the model); return its slot.

        Raises: CapacityError if ``max_slots`` are open or ``max_rows`` is out of range.
        """
        capacity = self.max_rows if max_rows is None else max_rows
        if not 1 <= capacity <= self.max_rows:
            raise CapacityError(f"a sequence has room for 1 to {self.max_rows} rows, got {capacity}")
        if self._max_slots is not None and len(self._sequences) >= self._max_slots:
            raise CapacityError(f"all {self._max_slots} slots are open; close one first")
        self._next_slot += 1  # slots are never used twice, so that a stale one is caught
        self._sequences[self._next_slot - 1] = _Rows(capacity)
        return self._next_slot - 1

    def close(self, slot: int) -> None:
        """Drop a sequence. Raises: ModelError if the slot is not open."""
        self._rows(slot)
        del self._sequences[slot]

    def num_rows(self, slot: int) -> int:
        """Return how many rows the sequence holds. Raises: ModelError if the slot is not open."""
        return len(self._rows(slot).token_ids)

    def capacity(self, slot: int) -> int:
        """Return how many rows the sequence has room for. Raises: ModelError if the slot is not open."""
        return self._rows(slot).capacity

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first ``num_rows`` rows of ``source`` the rows of the empty sequence ``slot``.

        Raises: ModelError if they do not exist or are no chain, or ``slot`` is not empty; CapacityError if they do
            not fit. Nothing has changed then.
        """
        origin, target = self._rows(source), self._rows(slot)
        if target.token_ids:
            raise ModelError(f"slot {slot} holds {len(target.token_ids)} rows; rows are copied into an empty one only")
        if not 0 <= num_rows <= len(origin.token_ids) or origin.parents[:num_rows] != list(range(-1, num_rows - 1)):
            raise ModelError(
                f"the first {num_rows} of {len(origin.token_ids)} rows of slot {source} do not exist or are no chain"
            )
        if num_rows > target.capacity:
            raise CapacityError(f"{num_rows} rows are more than slot {slot} has room for ({target.capacity})")
        self._sequences[slot] = _Rows(
            target.capacity, origin.token_ids[:num_rows], origin.parents[:num_rows], origin.positions[:num_rows]
        )

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        """Append the new tokens of several sequences.

        Returns: per extension [T - first_logits_idx, V] float32.
        Raises: CapacityError if rows or positions do not suffice; ModelError for any other broken argument, two
            extensions of one slot included. Nothing has changed then.
        """
        if len({extension.slot for extension in extensions}) < len(extensions):
            raise ModelError(f"one extension per slot, got slots {[extension.slot for extension in extensions]}")
        positions = [self._positions_of(extension) for extension in extensions]
        if extensions:
            self.num_forward_passes += 1
        held = {one.slot: len(self._rows(one.slot).token_ids) for one in extensions if one.scores is not None}
        scores = {
            slot: _uniforms(_mix(slot), rows).astype(np.float32).reshape(1, 1, rows) for slot, rows in held.items()
        }
        self.attention_scores.leave(scores)
        return [self._append(extension, new) for extension, new in zip(extensions, positions, strict=True)]

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep a prefix and then ``rows``, renumbered without gaps; drop the rest.

        Raises: ModelError if a row does not exist, is out of order or loses its parent. Nothing has changed then.
        """
        held = self._rows(slot)
        num_rows = len(held.token_ids)
        if not 0 <= num_prefix_rows <= num_rows:
            raise ModelError(f"num_prefix_rows must be 0 to {num_rows}, got {num_prefix_rows}")
        order = [*range(num_prefix_rows), *rows]
        if any(b <= a for a, b in itertools.pairwise(order)) or any(not 0 <= row < num_rows for row in rows):
            raise ModelError(f"rows must ascend, from {num_prefix_rows} on and below {num_rows}, got {list(rows)}")
        new_row = {NO_PARENT: NO_PARENT} | {row: idx for idx, row in enumerate(order)}
        for row in order:
            if held.parents[row] not in new_row:
                raise ModelError(f"row {row} is kept but its parent, row {held.parents[row]}, is not")
        self._sequences[slot] = _Rows(
            capacity=held.capacity,
            token_ids=[held.token_ids[row] for row in order],
            parents=[new_row[held.parents[row]] for row in order],
            positions=[held.positions[row] for row in order],
        )

    def _make_logits(self, context: tuple[int, ...]) -> Floats:
        """Return [V] float32 after ``context``, at most ``order`` tokens: independent Gumbel variables times spread."""
        uniforms = _uniforms(_hash(self.seed, context), self.vocab_size)
        return (-self.spread * np.log(-np.log(uniforms))).astype(np.float32)

    def _rows(self, slot: int) -> _Rows:
        if slot not in self._sequences:
            raise ModelError(f"slot {slot} is not open; open slots: {sorted(self._sequences)}")
        return self._sequences[slot]

    def _positions_of(self, extension: Extension) -> list[int]:
        """Check the extension and return the position of each new row."""
        held = self._rows(extension.slot)
        num_held, num_new = len(held.token_ids), len(extension.token_ids)
        if len(extension.parents) != num_new:
            raise ModelError(f"{num_new} token_ids need as many parents, got {len(extension.parents)}")
        if not 0 <= extension.first_logits_idx <= num_new:
            raise ModelError(f"first_logits_idx must be 0 to {num_new}, got {extension.first_logits_idx}")
        if num_held + num_new > held.capacity:
            raise CapacityError(
                f"{num_held} rows and {num_new} new ones are more than the sequence has room for ({held.capacity})"
            )
        if (reads := extension.reads) is not None:
            if reads.since > num_held or reads.rows.max(initial=-1) >= reads.since or reads.rows.shape[:2] != (1, 1):
                raise ModelError(f"rows {reads.rows.tolist()} below {reads.since} of {num_held} cannot be read")
            if held.parents != list(range(-1, num_held - 1)) or min(extension.parents) < num_held - 1:
                raise ModelError("chosen rows are read by tokens below the last of a chain only")
        positions: list[int] = []
        for row, (token_id, parent) in enumerate(zip(extension.token_ids, extension.parents, strict=True), num_held):
            if not 0 <= token_id < self.vocab_size:
                raise ModelError(f"token ids must be 0 to {self.vocab_size - 1}, got {token_id}")
            if not NO_PARENT <= parent < row:
                raise ModelError(f"the parent of row {row} must be {NO_PARENT} or an earlier row, got {parent}")
            if parent == NO_PARENT:
                position = 0
            else:
                position = 1 + (held.positions[parent] if parent < num_held else positions[parent - num_held])
            if position >= self.max_model_len:
                raise CapacityError(f"position {position} is not below max_model_len ({self.max_model_len})")
            positions.append(position)
        return positions

    def _append(self, extension: Extension, positions: list[int]) -> Floats:
        held = self._sequences[extension.slot]
        first_row = len(held.token_ids) + extension.first_logits_idx
        held.token_ids.extend(extension.token_ids)
        held.parents.extend(extension.parents)
        held.positions.extend(positions)
        self.num_forward_tokens += len(positions)
        model = self if extension.reads is None else self._with_few_rows()
        logits = [model.logits_after(self._context(held, row)) for row in range(first_row, len(held.token_ids))]
        return np.stack(logits) if logits else np.empty((0, self.vocab_size), np.float32)

    def _with_few_rows(self) -> TableModel:
        """Return a model that mostly agrees, as one that reads few rows does."""
        if self._of_few_rows is None:
            other = TableModel(_mix(self.seed), self.vocab_size, self.order, spread=self.spread)
            self._of_few_rows = other.blend(self, 0.8)
        return self._of_few_rows

    def _context(self, held: _Rows, row: int) -> list[int]:
        newest_first: list[int] = []
        while row != NO_PARENT and len(newest_first) < self.order:
            newest_first.append(held.token_ids[row])
            row = held.parents[row]
        return newest_first[::-1]


class MovableTable(TableModel):
    """A toy whose rows can be moved: they are the tokens."""

    def read_rows(self, slot: int) -> IntArray:
        return np.array(self._rows(slot).token_ids, np.int64)

    def write_rows(self, slot: int, rows: IntArray) -> None:
        held = self._rows(slot)
        assert not held.token_ids and len(rows) <= held.capacity
        held.token_ids += rows.tolist()
        held.parents += range(-1, len(rows) - 1)
        held.positions += range(len(rows))


class _BlendedModel(TableModel):
    """What `TableModel.blend` returns."""

    def __init__(self, own: TableModel, other: TableModel, agreement: float) -> None:
        if own.vocab_size != other.vocab_size:
            raise VocabularyError(
                f"the models to blend have {own.vocab_size} and {other.vocab_size} tokens; make them equal"
            )
        if not 0.0 <= agreement <= 1.0 or (agreement < 1.0 and own.vocab_size == 1):
            raise SettingsError(f"agreement must be 0 to 1, and 1 with a single token, got {agreement}")
        super().__init__(
            own.seed,
            own.vocab_size,
            max(own.order, other.order),
            spread=own.spread,
            max_model_len=own.max_model_len,
            num_tree_rows=own.max_rows - own.max_model_len,
            max_slots=own._max_slots,
            row_bytes=own.row_bytes,
        )
        self._own, self._other, self._agreement = own, other, agreement

    def _make_logits(self, context: tuple[int, ...]) -> Floats:
        wanted = self._other.logits_after(context)
        if _mix(_hash(self.seed, context)) < self._agreement * 2.0**64:
            return wanted
        logits = self._own.logits_after(context).copy()
        first, last = int(wanted.argmax()), int(logits.argmin())
        logits[[first, last]] = logits[[last, first]]
        return logits
