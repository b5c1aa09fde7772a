"""Drafting heads in NumPy, as they draft: their files, and the decoder layer that `head_layer` has as it is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from card.kernels.number_types import Array, Floats
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import target_difference
from card.models.own.exact_layers import rms_norm
from card.models.own.head_sizes import EPS, heads_of
from card.models.rows.row_tree import BoolArray, IntArray
from card.models.runner import RowRunner


class ArrayHead:
    """The head of a file, which proposes N of its target's tokens by the target's own embeddings."""

    FILE: ClassVar[TrainedFile]
    facts: Any

    def __init__(self, facts: Any, arrays: Mapping[str, Array], table: Floats | None = None) -> None:
        """Take over a file's arrays, and the target's embeddings [N, D], which `attach` may bring.

        Args:
            facts: with the shape of each weight.
        Raises: KeyError, ValueError if the arrays do not fit them.
        """
        self.facts = facts
        self.token_ids: IntArray = arrays["token_ids"].astype(np.int64)  # [N]
        self._probe = arrays["probe"].astype(np.float32)
        for name, shape in facts.shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {list(arrays[name].shape)}, its facts ask for {list(shape)}")
        self._weights: dict[str, Floats] = {name: arrays[name].astype(np.float32) for name in facts.shapes}
        self._table: Floats = np.zeros((0, facts.hidden_size), np.float32) if table is None else table

    @classmethod
    def of(cls, said: Mapping[str, str], arrays: Mapping[str, Array], table: Floats | None = None) -> Self:
        """Make a head of what its file says; other arguments and errors as of the class."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a head that a training wrote. Raises: ModelError for a missing, damaged or other file."""
        return cls.FILE.load(path, cls.of)

    def attach(self, target: RowRunner, name: str) -> None:
        """Use the target's embeddings. Raises: ModelError if the head was trained for another target."""
        self.FILE.check_made_for("target", name, target_difference(self.facts, target, self._probe))
        self._table = target.embeddings(self.token_ids.tolist())

    def memory(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return keys and values of rows [B, S, d], [B, H, S, d / H] each."""
        x = rms_norm(rows, self._weights["layer.norm.weight"], EPS)
        return self._heads(x, "key"), self._heads(x, "value")

    def layer(self, rows: Floats, keys: Floats, values: Floats, seen: BoolArray) -> Floats:
        """Return rows [B, T, d] after attention to a memory and the MLP.

        Args:
            keys, values: of `memory`, of S rows.
            seen: [B or 1, T or 1, S].
        """
        weights = self._weights
        query = self._heads(rms_norm(rows, weights["layer.norm.weight"], EPS), "query")
        scores: Floats = query @ keys.swapaxes(-1, -2) * np.float32(query.shape[-1] ** -0.5)
        scores[~np.broadcast_to(seen[:, None], scores.shape)] = -math.inf
        mixed = (np.exp(log_softmax(scores)) @ values).swapaxes(1, 2).reshape(rows.shape)
        rows = rows + mixed @ weights["layer.out.weight"].T
        x = rms_norm(rows, weights["layer.mlp_norm.weight"], EPS)
        gate = x @ weights["layer.gate.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (x @ weights["layer.up.weight"].T)
        added: Floats = rows + inner @ weights["layer.down.weight"].T
        return added

    def _heads(self, x: Floats, name: str) -> Floats:
        """Return rows [B, S, d] through a projection, as heads [B, H, S, d / H]."""
        made: Floats = x @ self._weights[f"layer.{name}.weight"].T
        count = heads_of(x.shape[-1])
        return made.reshape(*x.shape[:2], count, x.shape[-1] // count).swapaxes(1, 2)


def log_softmax(x: Floats) -> Floats:
    """Return the logarithm of the softmax of the last axis."""
    below = x - x.max(-1, keepdims=True)
    logprobs: Floats = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return logprobs
