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
from pathlib import Path
from typing import Any

import numpy as np

from card.family.ctc.losses import LOSSES, Loss
from card.family.learning.layer_sizes import EPS, heads_of
from card.kernels.number_types import Array, Floats
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes, target_difference
from card.models.own.exact_layers import rms_norm
from card.models.rows.row_tree import BoolArray
from card.models.runner import RowRunner

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
        d, size, rows = self.width, self.hidden_size, (self.width,)
        square = {f"layer.{name}.weight": (d, d) for name in ("query", "key", "value", "out")}
        return {
            "read.weight": (d, 2 * size),
            "places": (self.window, d),
            "slots": (self.num_slots, d),
            **square,
            **{f"layer.{name}.weight": (2 * d, d) for name in ("gate", "up")},
            "layer.down.weight": (d, 2 * d),
            **{f"{name}.weight": rows for name in ("layer.norm", "layer.mlp_norm", "norm")},
            "out.weight": (size, d),
            "blank.weight": (1, d),
            "blank.bias": (1,),
        }


class Slots:
    """The head of a file: log-probabilities of T slots over N tokens and the blank, which is the last one."""

    def __init__(self, said: Mapping[str, str], arrays: dict[str, Array], table: Floats | None = None) -> None:
        """Take over a file's facts and arrays, and the target's embeddings [N, D], which `attach` may bring.

        Raises: KeyError, ValueError if they do not fit.
        """
        self.facts = HeadFacts.of(said)
        self.token_ids = arrays["token_ids"].astype(np.int64)  # [N]
        self._probe = arrays["probe"].astype(np.float32)
        for name, shape in self.facts.shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {list(arrays[name].shape)}, its facts ask for {list(shape)}")
        self._weights = {name: arrays[name].astype(np.float32) for name in self.facts.shapes}
        self._table: Floats = np.zeros((0, self.facts.hidden_size), np.float32) if table is None else table

    @classmethod
    def load(cls, path: str | Path) -> Slots:
        """Read a head that a training wrote. Raises: ModelError for a missing, damaged or other file."""
        return HEAD_FILE.load(path, cls)

    def attach(self, target: RowRunner, name: str) -> None:
        """Use the target's embeddings. Raises: ModelError if the head was trained for another target."""
        HEAD_FILE.check_made_for("target", name, target_difference(self.facts, target, self._probe))
        self._table = target.embeddings(self.token_ids.tolist())

    def logprobs(self, inputs: Floats, is_there: BoolArray) -> Floats:
        """Return the log-probabilities of the slots, [B, T, N + 1] float32; without CTC no slot is blank.

        Args:
            inputs: [B, W, 2 * D] of `inputs_of`, the newest row last.
            is_there: [B, W] bool; False where a text has fewer rows.
        """
        of = self._weights
        read = inputs @ of["read.weight"].T
        slots = of["slots"] + read[:, -1:]
        seen = np.pad(is_there, ((0, 0), (0, self.facts.num_slots)), constant_values=True)
        x = self._layer(slots, np.concatenate([read + of["places"], slots], 1), seen)
        x = rms_norm(x, of["norm.weight"], EPS)
        logits: Any = (x @ of["out.weight"].T) @ self._table.T
        if self.facts.loss == "ctc":
            blank: Floats = x @ of["blank.weight"].T + of["blank.bias"]
            return _log_softmax(np.concatenate([logits, blank], -1))
        return np.pad(_log_softmax(logits), ((0, 0), (0, 0), (0, 1)), constant_values=-math.inf)

    def _layer(self, slots: Floats, rows: Floats, seen: BoolArray) -> Floats:
        """Return slots [B, T, d] after attention to rows [B, S, d] and the MLP; ``seen`` is [B, S]."""
        of, num_heads = self._weights, heads_of(self.facts.width)
        asking, asked = (rms_norm(one, of["layer.norm.weight"], EPS) for one in (slots, rows))
        query = _heads(asking @ of["layer.query.weight"].T, num_heads)
        key, value = (_heads(asked @ of[f"layer.{name}.weight"].T, num_heads) for name in ("key", "value"))
        scores: Floats = query @ key.swapaxes(-1, -2) * np.float32(query.shape[-1] ** -0.5)
        scores[~np.broadcast_to(seen[:, None, None], scores.shape)] = -math.inf
        mixed = (np.exp(_log_softmax(scores)) @ value).swapaxes(1, 2).reshape(slots.shape)
        slots = slots + mixed @ of["layer.out.weight"].T
        x = rms_norm(slots, of["layer.mlp_norm.weight"], EPS)
        gate = x @ of["layer.gate.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (x @ of["layer.up.weight"].T)
        added: Floats = slots + inner @ of["layer.down.weight"].T
        return added


def inputs_of(features: Floats, embeddings: Floats) -> Floats:
    """Return a head's inputs: hidden states with the embeddings of the tokens chosen from them, [n, 2 * D].

    Args:
        features, embeddings: [n, D] each.
    Returns: float32; both halves have a mean square of 1.
    """
    ones = np.ones(features.shape[-1], np.float32)
    return np.concatenate([rms_norm(half.astype(np.float32), ones, EPS) for half in (features, embeddings)], -1)


def _heads(x: Floats, num_heads: int) -> Floats:
    """Return rows [B, S, d] as heads, [B, H, S, d / H]."""
    return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)


def _log_softmax(x: Floats) -> Floats:
    below = x - x.max(-1, keepdims=True)
    found: Floats = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return found
