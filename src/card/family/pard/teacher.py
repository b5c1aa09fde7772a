"""Lessons of a target for a drafter of K tokens a pass: its distributions, and weights of the guesses.

A guess matters only if all guesses before it are accepted. So its weight is the product of the probabilities that the
target gives to the text's tokens between its origin and itself.

Source: PARD-2, arXiv:2605.08632.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from card.family.pard.rows import IGNORED, PackedBatch
from card.family.pard.state_input import StateInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CROSS_ENTROPY_WEIGHT, _DIVERGENCE_WEIGHT = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """The target's weights and logits for the M tokens of a batch that have a label."""

    weights: Tensor  # [M] float32, in [0, 1]; 1 for tokens of the text
    logits: Tensor  # [M, V of the target] float
    states: Tensor | None = None  # [B, S of the texts, layers * D]; None: the drafter reads no states

    def loss(self, logits: Tensor, labels: Tensor, rows: slice) -> Tensor:
        """Return the summed loss of some of the tokens, in nats.

        Args:
            logits: [len(rows), V of the draft] float32 of the drafter.
            labels: [len(rows)] int64.
        """
        logprobs = logits.log_softmax(-1)
        num_shared = min(logits.shape[-1], self.logits.shape[-1])  # the drafter also has a mask token
        wanted = self.logits[rows, :num_shared].float().log_softmax(-1)
        divergence = (wanted.exp() * (wanted - logprobs[:, :num_shared])).sum(-1)
        cross_entropy = functional.nll_loss(logprobs, labels, reduction="none")
        weighted = _CROSS_ENTROPY_WEIGHT * cross_entropy + _DIVERGENCE_WEIGHT * divergence
        return (self.weights[rows] * weighted).sum()


class Teacher:
    """A target that a drafter learns from; its own weights do not change."""

    def __init__(self, model: PreTrainedModel, state_input: StateInput | None = None) -> None:
        """Use this model; ``state_input`` is the drafter's layer for its states, None without states."""
        self._model = model
        self.state_input = state_input

    def lesson(self, batch: PackedBatch) -> Lesson:
        """Run the texts of a batch through the target, without its masks."""
        is_text = batch.offsets == 0
        width = int(is_text.sum(1).max())
        text = batch.token_ids[:, :width].where(is_text[:, :width], torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            layers = () if self.state_input is None else self.state_input.layers
            output = self._model(input_ids=text, use_cache=False, output_hidden_states=bool(layers))
            logits = output.logits
            scores = logits[:, :-1].float().log_softmax(-1).gather(-1, text[:, 1:, None])[..., 0]
            path = functional.pad(scores.double().cumsum(1), (1, 0))  # [B, width] scores of the tokens up to each
            is_learnt = batch.labels != IGNORED
            row = torch.arange(len(text))[:, None].expand_as(batch.positions)[is_learnt]
            positions, origins = batch.positions[is_learnt], batch.origins[is_learnt]
            weights = (path[row, positions] - path[row, origins]).exp().float()
            states = torch.cat([output.hidden_states[layer] for layer in layers], -1) if layers else None
            return Lesson(weights, logits[row, positions], states)
