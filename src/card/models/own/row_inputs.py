"""The contract of what makes inputs for a drafter whose rows stand for a token and a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from card.kernels.number_types import Floats


class RowInputs(Protocol):
    """Makes the inputs of rows of tokens and states, for one kind of drafter."""

    @property
    def width(self) -> int:
        """Numbers of a state that a row takes, D: those of the drafter's own states."""

    @property
    def target_width(self) -> int:
        """Numbers of each of the target's states."""

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The target's states that are read, as `FeatureWish` counts them."""

    @property
    def own_state(self) -> int:
        """The drafter's own state that is handed on: `FINAL` or `RAW`."""

    @property
    def first_place(self) -> int:
        """Place in a text of the first token that is read."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""

    def fused(self, states: Floats) -> Floats:
        """Return what rows take, [n, D], of the target's states, [n, layers * width]."""

    def handed_on(self, states: Floats, depths: Sequence[int]) -> Floats:
        """Return what rows take, [n, D], of the drafter's own states behind nodes of these depths; the root has 0."""

    def rows(self, token_ids: Sequence[int], states: Floats) -> Floats:
        """Return `Extension.inputs` of rows with tokens [n] and what they take of states [n, D]."""
