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
from card.family.hivis.drafting import TextMemory, draft
from card.family.hivis.head import FusedHead
from card.family.learning.bound_module import scaled
from card.family.learning.head_training import IGNORED, FitSettings, TrainedHead, num_right, train
from card.family.learning.layer_sizes import require_width
from card.family.learning.target_texts import TargetTexts
from card.family.learning.unrolling import STEP_WEIGHT, of_the_row_before, seen_in
from card.models.runner import RowRunner

_STATE_WEIGHT = 0.1  # of the loss of states relative to that of tokens
_MOST_MEASURED = 256  # rows of held-out texts


@dataclass(frozen=True, slots=True, kw_only=True)
class HivisTrainSettings(FitSettings):
    """Settings of the training."""

    num_steps: int = 5  # S, unrolled
    width: int = 256  # of its layer
    epochs: int = 4
    batch_size: int = 16  # texts

    def __post_init__(self) -> None:
        """Check the ranges."""
        FitSettings.__post_init__(self)
        require(1 <= self.num_steps <= 16, "num_steps", "from 1 to 16", self.num_steps)
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

    def batch(self, some: Tensor) -> FusedBatch:
        """Return the texts with these indices [n], padded at their ends."""
        idxs = [self.chosen[i] for i in some.tolist()]
        rows = [self.texts.text(idx) for idx in idxs]
        labels = []
        for idx, row in zip(idxs, rows, strict=True):
            own = torch.full((row.stop - row.start,), IGNORED)
            first = max(self.texts.answer(idx), row.start + 1)
            own[first - 1 - row.start : -1] = self._labels[first : row.stop]
            labels.append(own)
        pad = torch.nn.utils.rnn.pad_sequence
        states, embeddings = (
            pad([one[row] for row in rows], batch_first=True) for one in (self.states, self.embeddings)
        )
        return FusedBatch(states, embeddings, pad(labels, batch_first=True, padding_value=IGNORED))


def train_fused(
    target: RowRunner, texts: TargetTexts, settings: HivisTrainSettings, **run: Any
) -> TrainedHead[FusedHead]:
    """Train a drafter for a target on texts with their prompts; ``run`` and errors as of `head_training.train`."""
    return train(
        FusedHead,
        {"num_steps": settings.num_steps, "width": settings.width},
        lambda some, embeddings, label_of: FusedExamples(texts, some, embeddings, label_of),
        lambda head, examples, some: loss_of(head, examples.batch(some)),
        accepted_by_depth,
        target=target,
        texts=texts,
        settings=settings,
        **run,
    )


def loss_of(head: FusedHead, batch: FusedBatch) -> Tensor:
    """Return the loss of all unrolled steps, in nats per learnt token; later steps have less weight."""
    total, places = torch.zeros(()), torch.arange(batch.labels.shape[1])
    for step, (states, logits) in enumerate(unrolled(head, batch.states, batch.embeddings)):
        labels = batch.labels.where(places >= step, torch.tensor(IGNORED))
        total = total + STEP_WEIGHT**step * _step_loss(states, logits, labels, batch.states)
    return total


def unrolled(head: FusedHead, truth: Tensor, embeddings: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the predictions of a batch in each step: states [B, T, D], and logits [B, T, N].

    Args:
        truth, embeddings: [B, T, D] scaled, of the target's states and of the next tokens.
    """
    places = torch.arange(truth.shape[1])
    states = truth
    keys, values = list[Tensor](), list[Tensor]()
    for step in range(head.facts.num_steps):
        if step:
            states = head.own_state(of_the_row_before(states), step)
        rows = head.read(states, embeddings)
        for kept, own in zip((keys, values), head.layer.memory(rows, places[None]), strict=True):
            kept.append(own)
        seen = seen_in(step, len(places))[None]
        rows = head.layer(rows, torch.cat(keys, 2), torch.cat(values, 2), seen, places[None])
        states, logits = head.guess(rows)
        yield states, logits


def _step_loss(states: Tensor, logits: Tensor, labels: Tensor, truth: Tensor) -> Tensor:
    is_learnt = labels != IGNORED
    if not is_learnt.any():
        return states.sum() * 0.0
    words = functional.cross_entropy(logits[is_learnt], labels[is_learnt])
    behind = is_learnt[:, :-1]
    return words + _STATE_WEIGHT * functional.smooth_l1_loss(states[:, :-1][behind], truth[:, 1:][behind])


def accepted_by_depth(head: FusedHead, examples: FusedExamples, num_candidates: int) -> tuple[float, ...]:
    """Return, for k = 1 and more, the share of rows whose next k tokens were among the candidates, in [0, 1]."""
    texts, depths, num_rows, running = examples.texts, list[int](), 0, head.running()
    states, embeddings = examples.states.numpy(), examples.embeddings.numpy()
    for idx in examples.chosen:
        row, first = texts.text(idx), texts.answer(idx)
        whole = TextMemory(running)
        whole.extend(0, states[row], embeddings[row])
        read = running.read(states[row], embeddings[row])
        ends = range(first + 1, row.stop)
        cut = [whole.until(end - row.start, read[end - 1 - row.start]) for end in ends]
        for end, tree in zip(ends, draft(running, cut), strict=True):
            depths.append(num_right(tree.leading(num_candidates), texts.token_ids[end : row.stop].tolist()))
        num_rows += len(ends)
        if num_rows >= _MOST_MEASURED:
            break
    deepest = max(depths, default=0)
    return tuple(sum(depth >= least for depth in depths) / num_rows for least in range(1, deepest + 1))
