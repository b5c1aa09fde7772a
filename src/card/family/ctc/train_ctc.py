"""Train a drafting head on the target's own texts, by CTC or slot by slot, and measure its candidates.

Sources: CTC-drafter, arXiv:2412.00061, for the loss over slots; Graves et al. 2006 for CTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from card.backends.transformers.arrays import as_tensor
from card.config.fields import require
from card.family.ctc.candidates import candidates_of
from card.family.ctc.head import SlotHead
from card.family.ctc.losses import LOSSES, Loss
from card.family.ctc.slots import inputs_of
from card.family.learning.head_training import IGNORED, FitSettings, TrainedHead, num_right, train
from card.family.learning.target_texts import TargetTexts
from card.models.own.head_sizes import require_width
from card.models.runner import RowRunner

_MOST_MEASURED = 512  # rows of held-out texts


@dataclass(frozen=True, slots=True, kw_only=True)
class CtcTrainSettings(FitSettings):
    """Settings of the training."""

    loss: Loss = "ctc"
    num_slots: int = 6  # T
    num_labels: int = 4  # tokens ahead that CTC learns; more slots than labels leave room for blanks
    window: int = 4  # rows of the text that a slot reads
    width: int = 256  # of the head's layer
    epochs: int = 2
    batch_size: int = 256  # rows

    def __post_init__(self) -> None:
        FitSettings.__post_init__(self)
        require(self.loss in LOSSES, "loss", f"one of {', '.join(LOSSES)}", self.loss)
        require(1 <= self.num_slots <= 16, "num_slots", "from 1 to 16", self.num_slots)
        require(1 <= self.num_labels <= self.num_slots, "num_labels", "from 1 to num_slots", self.num_labels)
        require(self.window >= 1, "window", "1 or more", self.window)
        require_width(self.width)

    @property
    def num_learnt(self) -> int:
        """Tokens after a row that its slots learn: without blanks, one per slot."""
        return self.num_labels if self.loss == "ctc" else self.num_slots


def labels_of(num_slots: int) -> int:
    """Return how many tokens ahead so many slots learn by CTC: two thirds, so that there is room for blanks."""
    return max(1, round(num_slots * 2 / 3))


class SlotExamples:
    """Rows of texts as a head reads them, each with the next tokens."""

    def __init__(
        self, texts: TargetTexts, chosen: Sequence[int], embeddings: Tensor, window: int, label_of: Tensor
    ) -> None:
        """Take some texts.

        Args:
            embeddings: [M, D] of the texts' tokens.
            label_of: as of `common_tokens`.
        """
        self.label_of = label_of
        places = [texts.text(idx) for idx in chosen]
        rows = [torch.arange(place.start, place.stop) for place in places]
        self._inputs = as_tensor(inputs_of(texts.features.numpy(), embeddings.numpy()))
        self._token_ids, self._window = texts.token_ids, window
        self.first = torch.cat(
            [torch.full_like(of_text, place.start) for of_text, place in zip(rows, places, strict=True)]
        )
        self.end = torch.cat(
            [torch.full_like(of_text, place.stop) for of_text, place in zip(rows, places, strict=True)]
        )
        self.rows = torch.cat(rows)
        has_label = self.rows + 1 < self.end
        self.rows, self.first, self.end = self.rows[has_label], self.first[has_label], self.end[has_label]

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, some: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's input for some examples: [n, W, 2 * D], and [n, W] bool, True for rows that exist."""
        places = self.rows[some, None] + torch.arange(1 - self._window, 1)
        is_there = places >= self.first[some, None]
        return self._inputs[places.clamp_min(0)], is_there

    def labels(self, some: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the next tokens of some examples, [n, count] int64, and their numbers, [n]."""
        places = self.rows[some, None] + torch.arange(1, count + 1)
        num_labels = (self.end[some] - 1 - self.rows[some]).clamp_max(count)
        return self._token_ids[places.clamp_max(len(self._token_ids) - 1)], num_labels


def train_head(target: RowRunner, texts: TargetTexts, settings: CtcTrainSettings, **run: Any) -> TrainedHead[SlotHead]:
    """Train a head for a target; ``run`` and errors as of `card.family.learning.head_training.train`."""
    return train(
        SlotHead,
        {name: getattr(settings, name) for name in ("loss", "num_slots", "window", "width")},
        lambda some, embeddings, label_of: SlotExamples(texts, some, embeddings, settings.window, label_of),
        lambda head, examples, some: loss_of(head, examples, some, settings),
        accepted_by_depth,
        target=target,
        texts=texts,
        settings=settings,
        **run,
    )


def loss_of(head: SlotHead, examples: SlotExamples, some: Tensor, settings: CtcTrainSettings) -> Tensor:
    """Return the mean loss of some examples, in nats a learnt token."""
    token_ids, num_labels = examples.labels(some, settings.num_learnt)
    labels = examples.label_of[token_ids]
    is_label = torch.arange(settings.num_learnt) < num_labels[:, None]
    logits = head(*examples.inputs(some))
    if settings.loss == "cross-entropy":
        labels = labels.where(is_label, torch.tensor(IGNORED))
        return functional.cross_entropy(logits[..., :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    known = (is_label & (labels != IGNORED)).long().cumprod(1).sum(1)  # learn only up to a token that the head lacks
    num_slots = settings.num_slots
    losses = functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1),
        labels.clamp_min(0),
        torch.full_like(known, num_slots),
        known,
        blank=logits.shape[-1] - 1,
        reduction="none",
        zero_infinity=True,  # labels with more repeats than there is room for
    )
    return losses.sum() / known.sum().clamp_min(1)


def accepted_by_depth(head: SlotHead, examples: SlotExamples, num_candidates: int) -> tuple[float, ...]:
    """Return, for k = 1 to T, the share of rows whose next k tokens were among the candidates, in [0, 1]."""
    stride = max(1, len(examples) // _MOST_MEASURED)
    some = torch.arange(0, len(examples), stride)
    depths = torch.zeros(head.facts.num_slots, dtype=torch.float64)
    running = head.running()
    logprobs = running.logprobs(*(one.numpy() for one in examples.inputs(some)))
    token_ids, num_labels = examples.labels(some, head.facts.num_slots)
    for row, labels, count in zip(logprobs, token_ids.tolist(), num_labels.tolist(), strict=True):
        depths[: num_right(candidates_of(running, row, num_candidates), labels[:count])] += 1
    return tuple((depths / max(1, len(some))).tolist())
