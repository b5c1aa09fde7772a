"""Contract of a language model: logits for new tokens with parents, and row operations on its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from card.config.selection import ScoreKind
from card.kernels.number_types import Array, Floats
from card.models.rows.parts import PartForm, RowsPart
from card.models.rows.selection import AttentionScores, ChosenRows
from card.tree.logits import Logits

NO_PARENT = -1  # parent of a sequence's first token


@dataclass(frozen=True, slots=True)
class Extension:
    """New tokens of one sequence for one forward call.

    A sequence holds rows 0, 1, 2, ... in its KV cache, one per token, each with a parent row; a chain is the tree in
    which row i has parent i - 1. A token sees itself and its ancestors; its position is the number of its ancestors.
    """

    slot: int  # which sequence, as returned by `open`
    token_ids: Sequence[int]  # [T]; they become rows num_rows, num_rows + 1, ... in this order
    parents: Sequence[int]  # [T] parent row of each: NO_PARENT, a row held already, or an earlier row of this call
    first_logits_idx: int = 0  # logits are returned for token_ids[first_logits_idx:]
    reads: ChosenRows | None = None  # None: all rows that a token may see; only a `Selective` model knows others
    scores: ScoreKind | None = None  # of the rows held already, to be kept of this pass; by a `Selective` model only
    inputs: Floats | None = None
    """[n, D], in the place of the first n tokens' embeddings; by a `RowRunner` only.

    Where the model `adds_heads`, sums that queries, keys and values begin from stand behind each row.
    """

    @classmethod
    def of_text(cls, slot: int, token_ids: Sequence[int], num_held: int = 0, first_logits: int = -1) -> Extension:
        """Return the tokens of a text behind its first ``num_held`` ones, as a chain.

        Args:
            first_logits: token of the text from which on logits are returned; -1: the last one alone.
        """
        idx = range(len(token_ids))[first_logits]
        return cls(slot, token_ids[num_held:], range(num_held - 1, len(token_ids) - 1), idx - num_held)


class LanguageModel(Protocol):
    """A causal language model with row-wise control over its KV caches. It never decides anything."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; V below."""

    @property
    def max_model_len(self) -> int:
        """Most positions of one sequence; a token's position is below this."""

    @property
    def max_rows(self) -> int:
        """Most rows of one sequence: max_model_len and room for a tree."""

    @property
    def row_bytes(self) -> int:
        """Memory that one row of one sequence takes, all layers together."""

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence with room for ``max_rows`` rows and return its slot; None: the model's `max_rows`.

        A slot number is never given twice. Raises: CapacityError if there is no such room.
        """

    def close(self, slot: int) -> None:
        """Drop a sequence and free its rows."""

    def num_rows(self, slot: int) -> int:
        """Return how many rows the sequence holds."""

    def capacity(self, slot: int) -> int:
        """Return how many rows the sequence has room for."""

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first ``num_rows`` rows of ``source`` the rows of the empty sequence ``slot``, bit for bit.

        Raises: ModelError if they are no chain in ``source``, or ``slot`` is not empty; CapacityError if ``slot`` has
            no room for them. Nothing has changed then.
        """

    def forward(self, extensions: Sequence[Extension]) -> list[Logits]:
        """Run the new tokens of several sequences in one pass and append their rows.

        Returns: per extension [T - first_logits_idx, V] logits, float32 or float64.
        Raises: CapacityError if a sequence's rows or the positions do not suffice; nothing has changed then.
        """

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep rows 0 .. num_prefix_rows - 1 and then ``rows``, in this order; drop the rest.

        ``rows`` ascend and lie beyond the prefix. The kept rows are renumbered without gaps; every parent of a kept row
        must be kept too.
        """


@runtime_checkable
class LengthDependent(LanguageModel, Protocol):
    """A model whose rows depend on the length of their text: a longer one than `switch_len` has other rows."""

    @property
    def switch_len(self) -> int | None:
        """Most tokens of a text that has the rows of a short one; None if no text is longer."""

    def make_long(self, slot: int) -> None:
        """Let the rows of an empty sequence be those of a long text from now on."""


@runtime_checkable
class Movable(LanguageModel, Protocol):
    """A model whose rows can be taken out and put back, bit for bit."""

    def read_rows(self, slot: int) -> Array:
        """Return a copy of the rows of a sequence, which are a chain."""

    def write_rows(self, slot: int, rows: Array) -> None:
        """Fill an empty sequence with such rows. Raises: CapacityError if it has no room for them."""


@runtime_checkable
class Divisible(LanguageModel, PartForm, Protocol):
    """A model whose rows can be taken out and put back in parts, bit for bit."""

    def separable_rows(self, slot: int, num_rows: int) -> int:
        """Return behind how many of the first ``num_rows`` rows of a sequence a text can end that is taken out."""

    def read_part(self, slot: int, part: RowsPart) -> Array:
        """Return a copy of some rows of a chain. Raises: ModelError if they, or what belongs to them, are not there.

        Another thread than that of the passes may call this; it then reads anything of rows that change meanwhile.
        """

    def append_part(self, slot: int, part: RowsPart, taken: bytes | memoryview, num_rows: int) -> None:
        """Put the first ``num_rows`` of such rows behind a chain. Raises: CapacityError if there is no room."""


@runtime_checkable
class Sharing(LanguageModel, Protocol):
    """A model whose sequences share memory of rows that one has copied from another, until one changes them."""

    def held_bytes(self, slots: Sequence[int]) -> int:
        """Return the memory of sequences, with room for all rows that they may have; what several share counts once."""

    def shared_bytes(self, num_rows: int) -> int:
        """Return the memory that a copy of the first rows of a sequence shares with it."""


@runtime_checkable
class Stateful(LanguageModel, Protocol):
    """A model that keeps more of a sequence than its rows."""

    @property
    def state_bytes(self) -> int:
        """Memory that one sequence takes besides its rows, at most."""

    def lendable_rows(self, slot: int, num_rows: int) -> int:
        """Return how many of the first ``num_rows`` rows can be copied without being run once more."""


class Experts(Protocol):
    """Facts of a model's expert layers."""

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""

    @property
    def num_experts(self) -> int:
        """Number of experts of such a layer."""

    @property
    def experts_per_token(self) -> int:
        """Number of experts of such a layer that one row chooses."""


@runtime_checkable
class Routed(LanguageModel, Protocol):
    """A model that may have experts, of which each row chooses a few in each layer that has any."""

    @property
    def experts(self) -> Experts | None:
        """Facts of its expert layers; None if it has none."""

    @property
    def experts_read(self) -> int:
        """Distinct experts that the last pass read, summed over the layers; 0 if they are not counted."""


@runtime_checkable
class Recurrent(Stateful, Protocol):
    """A model with a state that cannot be cut. The rows of a sequence are a chain; other extensions are refused."""

    @property
    def runs_row_by_row(self) -> bool:
        """True if layers with a state run several tokens one by one, as their scan would lose the state."""


@runtime_checkable
class Selective(LanguageModel, Protocol):
    """A model whose passes may read chosen rows only, and keep scores of the rows that they read.

    Rows of a sequence that reads chosen ones are a chain, and so are the new ones.
    """

    @property
    def attention_scores(self) -> AttentionScores:
        """Scores that the last pass has kept."""

    def bytes_read(self, num_rows: int, reads: ChosenRows | None) -> int:
        """Return the bytes of KV that a pass reads of a sequence with ``num_rows`` rows, the new ones included."""


def sequence_bytes(model: LanguageModel, num_rows: int) -> int:
    """Return the memory that a sequence with room for so many rows takes, its states included."""
    return num_rows * model.row_bytes + (model.state_bytes if isinstance(model, Stateful) else 0)
