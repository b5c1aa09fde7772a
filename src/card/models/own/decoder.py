"""The protocol of a decoder, which computes the passes of a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from card.models.features import PassStates
from card.models.images import ImageRows
from card.models.protocol import Extension
from card.models.rows.kv_cache import KVLayout, SequenceRows
from card.models.rows.row_tree import Window


class Decoder(Protocol):
    """Computes the passes of a runner."""

    vocab_size: int  # V of the logits
    layout: KVLayout  # of the rows that it reads and writes

    @property
    def windows(self) -> Sequence[Window]:
        """Windows of the layers, by which they see a text."""

    def step(self, sequence: SequenceRows, extension: Extension, offset: int) -> Any:
        """Prepare the pass of an extension's rows, the newest ones; ``offset`` is that of their first among all."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: Sequence[Any],
        logits_rows: Tensor | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Return logits [rows, V] of the chosen rows of a pass."""
