"""A head as it drafts: T slots, each a distribution over tokens and a blank, from the target's hidden states.

In one decoder layer, a slot reads the other slots and the last rows of the text: each row is a hidden state with the
embedding of the token chosen from it. The output is compared with the target's own embeddings, so that a file holds no
vocabulary. The head proposes only tokens that the target wrote in training.

Source: CTC-drafter, Wen et al. 2024, arXiv:2412.00061. Ours: the blank is no token of the target's, one pass
makes all slots, and the same head can be trained by cross-entropy per slot, like Medusa's heads (arXiv:2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from card.family.ctc.losses import LOSSES, Loss
from card.family.learning.array_head import ArrayHead, log_softmax
from card.kernels.number_types import Array, Floats
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes
from card.models.own.exact_layers import rms_norm
from card.models.own.head_sizes import EPS, layer_shapes, scaled_rows
from card.models.rows.row_tree import BoolArray

HEAD_FILE = TrainedFile("head", "card-ctc-1", "card train ctc")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts(TargetSizes):
    """Sizes of a head, and the facts of its training."""

    loss: Loss
    num_slots: int  # T
    window: int  # rows of the text that a slot reads, W
    width: int  # of its layer, d

    @classmethod
    def of(cls, said: Mapping[str, str]) -> HeadFacts:
        """Parse the facts of a file. Raises: KeyError, ValueError if they are faulty."""
        loss: Any = said["loss"]
        if loss not in LOSSES:
            raise ValueError(f"loss {loss!r}")
        return cls(loss=loss, **{one.name: int(said[one.name]) for one in fields(cls) if one.name != "loss"})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by its name."""
        d, size = self.width, self.hidden_size
        return {
            "read.weight": (d, 2 * size),
            "places": (self.window, d),
            "slots": (self.num_slots, d),
            **layer_shapes(d),
            "norm.weight": (d,),
            "out.weight": (size, d),
            "blank.weight": (1, d),
            "blank.bias": (1,),
        }


class Slots(ArrayHead):
    """The head of a file: log-probabilities of T slots over N tokens and the blank, which is the last one."""

    FILE = HEAD_FILE
    facts: HeadFacts

    @classmethod
    def of(cls, said: Mapping[str, str], arrays: Mapping[str, Array], table: Floats | None = None) -> Slots:
        """Make a head of what its file says; arguments and errors as of `ArrayHead.of`."""
        return cls(HeadFacts.of(said), arrays, table)

    def logprobs(self, inputs: Floats, is_there: BoolArray) -> Floats:
        """Return the log-probabilities of the slots, [B, T, N + 1] float32; without CTC no slot is blank.

        Args:
            inputs: [B, W, 2 * D] of `inputs_of`, the newest row last.
            is_there: [B, W] bool; False where a text has fewer rows.
        """
        weights = self._weights
        read = inputs @ weights["read.weight"].T
        slots = weights["slots"] + read[:, -1:]
        seen = np.pad(is_there, ((0, 0), (0, self.facts.num_slots)), constant_values=True)
        memory = self.memory(np.concatenate([read + weights["places"], slots], 1))
        x = self.layer(slots, *memory, seen[:, None])
        x = rms_norm(x, weights["norm.weight"], EPS)
        logits: Any = (x @ weights["out.weight"].T) @ self._table.T
        if self.facts.loss == "ctc":
            blank: Floats = x @ weights["blank.weight"].T + weights["blank.bias"]
            return log_softmax(np.concatenate([logits, blank], -1))
        return np.pad(log_softmax(logits), ((0, 0), (0, 0), (0, 1)), constant_values=-math.inf)


def inputs_of(features: Floats, embeddings: Floats) -> Floats:
    """Return a head's inputs: hidden states with the embeddings of the tokens chosen from them, [n, 2 * D].

    Args:
        features, embeddings: [n, D] each.
    Returns: float32; both halves have a mean square of 1.
    """
    return np.concatenate([scaled_rows(features), scaled_rows(embeddings)], -1)
