"""Train a drafter that reads a target's hidden states, on the target's own texts.

Training is unrolled (`card.family.learning.unrolling`): in each step the drafter learns the tokens and states of the
target.

Source: HiViS, arXiv:2509.23928, for text rows alone and vectors of the steps. The weights of the losses are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from card.config.fields import require
from card.family.hivis.head import FusedModule
from card.family.learning.bound_module import scaled
from card.family.learning.head_training import IGNORED, FitSettings, TrainedHead, train
from card.family.learning.target_texts import TargetTexts
from card.family.learning.unrolling import MEASURED_STEPS, STEP_WEIGHT, ChainCounts, of_the_row_before, seen_in
from card.models.own.fused_head import MOST_LAYERS
from card.models.own.head_sizes import require_width
from card.models.runner import RowRunner

_STATE_WEIGHT = 0.1  # of the loss of states relative to that of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HivisTrainSettings(FitSettings):
    """Settings of the training."""

    num_steps: int = 5  # S, unrolled
    width: int = 256  # of its layers
    num_layers: int = 1
    epochs: int = 4
    batch_size: int = 16  # texts

    def __post_init__(self) -> None:
        FitSettings.__post_init__(self)
        require(1 <= self.num_steps <= 16, "num_steps", "from 1 to 16", self.num_steps)
        require(1 <= self.num_layers <= MOST_LAYERS, "num_layers", f"from 1 to {MOST_LAYERS}", self.num_layers)
        require_width(self.width)


@dataclass(frozen=True, slots=True)
class FusedBatch:
    """Rows of B texts, T of the longest; a row holds a state and the next token."""

    states: Tensor  # [B, T, D] scaled
    embeddings: Tensor  # [B, T, D] scaled
    labels: Tensor  # [B, T] int64: place of the token after the row's own; `IGNORED` if it is not learnt


class FusedExamples:
    """Texts as a drafter reads them."""

    def __init__(self, texts: TargetTexts, chosen: Sequence[int], embeddings: Tensor, label_of: Tensor) -> None:
        """Take some texts.

        Args:
            embeddings: [M, D] of the texts' tokens.
            label_of: as of `common_tokens`.
        """
        self.states, self.embeddings = scaled(texts.features), scaled(embeddings)
        self.texts, self.chosen, self._labels = texts, list(chosen), label_of[texts.token_ids]

    def __len__(self) -> int:
        return len(self.chosen)

    def num_learnt(self, idx: int) -> int:
        """Return how many tokens of a text are learnt."""
        return self.texts.num_learnt(self.chosen[idx])

    def batch(self, some: Tensor) -> FusedBatch:
        """Return the texts with these indices [n], padded at their ends."""
        idxs = [self.chosen[i] for i in some.tolist()]
        rows = [self.texts.text(idx) for idx in idxs]
        labels = []
        for idx, row in zip(idxs, rows, strict=True):
            text_labels = torch.full((row.stop - row.start,), IGNORED)
            first = max(self.texts.answer(idx), row.start + 1)
            text_labels[first - 1 - row.start : -1] = self._labels[first : row.stop]
            labels.append(text_labels)
        pad = torch.nn.utils.rnn.pad_sequence
        states, embeddings = (
            pad([one[row] for row in rows], batch_first=True) for one in (self.states, self.embeddings)
        )
        return FusedBatch(states, embeddings, pad(labels, batch_first=True, padding_value=IGNORED))


def train_fused(
    target: RowRunner, texts: TargetTexts, settings: HivisTrainSettings, **run: Any
) -> TrainedHead[FusedModule]:
    """Train a drafter for a target on texts with their prompts; ``run`` and errors as of `head_training.train`."""
    return train(
        FusedModule,
        {"num_steps": settings.num_steps, "width": settings.width, "num_layers": settings.num_layers},
        lambda some, embeddings, label_of: FusedExamples(texts, some, embeddings, label_of),
        lambda head, examples, some: loss_of(head, examples.batch(some)),
        accepted_by_depth,
        target=target,
        texts=texts,
        settings=settings,
        num_candidates=MEASURED_STEPS,
        **run,
    )


def loss_of(head: FusedModule, batch: FusedBatch) -> Tensor:
    """Return the loss of all unrolled steps, in nats per learnt token; later steps have less weight."""
    total, places = torch.zeros(()), torch.arange(batch.labels.shape[1])
    steps = unrolled(head, batch.states, batch.embeddings, head.facts.num_steps)
    for step, (states, logits) in enumerate(steps):
        labels = batch.labels.where(places >= step, torch.tensor(IGNORED))
        total = total + STEP_WEIGHT**step * _step_loss(states, logits, labels, batch.states)
    return total


def unrolled(head: FusedModule, truth: Tensor, embeddings: Tensor, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the predictions of a batch in each step: states [B, T, D], and logits [B, T, N].

    Args:
        truth, embeddings: [B, T, D] scaled, of the target's states and of the next tokens.
    """
    places = torch.arange(truth.shape[1])
    states = truth
    layers: list[Any] = [*head.layers]
    memories: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for step in range(num_steps):
        if step:
            states = head.own_state(of_the_row_before(states), step)
        rows, seen = head.read(states, embeddings), seen_in(step, len(places))[None]
        for layer, memory in zip(layers, memories, strict=True):
            memory.append(layer.memory(rows, places[None]))
            keys, values = (torch.cat(parts, 2) for parts in zip(*memory, strict=True))
            rows = layer(rows, keys, values, seen, places[None])
        states, logits = head.guess(rows)
        yield states, logits


def _step_loss(states: Tensor, logits: Tensor, labels: Tensor, truth: Tensor) -> Tensor:
    is_learnt = labels != IGNORED
    if not is_learnt.any():
        return states.sum() * 0.0
    words = functional.cross_entropy(logits[is_learnt], labels[is_learnt])
    behind = is_learnt[:, :-1]
    return words + _STATE_WEIGHT * functional.smooth_l1_loss(states[:, :-1][behind], truth[:, 1:][behind])


@torch.inference_mode()
def accepted_by_depth(head: FusedModule, examples: FusedExamples, num_steps: int) -> tuple[float, ...]:
    """Return, for k = 1 to ``num_steps``, the share of rows whose next k tokens a chain has right, in [0, 1]."""
    counts = ChainCounts(num_steps)
    for idx in range(len(examples)):
        batch = examples.batch(torch.tensor([idx]))
        rows = slice(batch.labels.shape[1] - 1 - examples.num_learnt(idx), -1)
        steps = unrolled(head, batch.states, batch.embeddings, num_steps)
        counts.add((logits[0, rows].argmax(-1) for _, logits in steps), batch.labels[0, rows])
        if counts.is_enough:
            break
    return counts.shares
