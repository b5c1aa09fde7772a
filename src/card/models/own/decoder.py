"""The protocol of a decoder, which computes the passes of a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from card.kernels.number_types import Floats
from card.models.features import PassStates
from card.models.images import ImageRows
from card.models.protocol import Extension
from card.models.rows.kv_cache import SequenceRows
from card.models.rows.kv_layout import KVLayout
from card.models.rows.row_tree import BoolArray, IntArray, Window


class Decoder(Protocol):
    """Computes the passes of a runner."""

    vocab_size: int  # V of the logits
    layout: KVLayout  # of the rows that it reads and writes
    # [sum T], true for rows of the next pass whose text is longer than `switch_len`; None: no text is.
    long_rows: BoolArray | None

    @property
    def windows(self) -> Sequence[Window]:
        """Windows of the layers, by which they see a text."""

    def step(self, sequence: SequenceRows, extension: Extension, offset: int) -> Any:
        """Prepare the pass of an extension's rows, the newest ones; ``offset`` is the first one's place in the pass."""

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        steps: Sequence[Any],
        logits_rows: IntArray | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Floats:
        """Return logits [rows, V] of the chosen rows of a pass."""
