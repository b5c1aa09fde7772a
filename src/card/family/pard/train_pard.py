"""Adapt a causal language model into a drafter of K tokens a pass, and measure its guesses.

Sources: PARD, arXiv:2504.18583, for rows and drop; calibration by temperature, Guo et al. 2017, arXiv:1706.04599.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from card.backends.transformers.devices import computes_bfloat16
from card.config.fields import require
from card.errors import PromptError
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.fit import FitRule, StepLoss, fit
from card.family.pard.rows import IGNORED, Document, Drop, PackedBatch, PackedRow, batch_of, kept_origins, packed_row
from card.family.pard.teacher import Lesson, Teacher
from card.models.parallel_draft import MOST_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 32  # held-out documents
TINY_SIZE = 100_000_000  # parameters: smaller models learn at the first of these rates, others at the published one
_TINY_RATE, _PUBLISHED_RATE = 1e-3, 1e-5
_BLOCK_ROWS = 1024  # of logits in one block
_TEMPERATURES = tuple(1.1**power for power in range(-6, 13))  # tried in calibration: 0.56 to 3.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PardTrainSettings:
    """Settings of the training."""

    num_tokens: int = 8  # K
    retention: float = 0.7  # share of an offset's masks that the next offset keeps; 1 is without conditional drop
    least_retention: float = 0.2  # share of the masks that every offset keeps
    state_drop: float = 0.15  # share of the texts that are read without the target's states
    epochs: int = 1
    tokens_per_step: int = 4096  # masks and padding included
    learning_rate: float | None = None  # at its peak; None: the default for the model's size
    seed: int = 0
    checkpoint_steps: int = 25  # from one checkpoint to the next

    def __post_init__(self) -> None:
        for name, least, most in (("num_tokens", 2, MOST_TOKENS), ("epochs", 1, 1000), ("checkpoint_steps", 1, None)):
            value = getattr(self, name)
            holds = least <= value and (most is None or value <= most)
            require(holds, name, f"{least} to {most or 'any number'}", value)
        for name in ("retention", "least_retention", "state_drop"):
            require(0.0 <= getattr(self, name) <= 1.0, name, "a share from 0 to 1", getattr(self, name))
        rate = self.learning_rate
        require(rate is None or 0.0 < rate < 1.0, "learning_rate", "above 0 and below 1", rate)

    @property
    def drop(self) -> Drop:
        """Conditional drop of these settings."""
        return Drop(num_tokens=self.num_tokens, retention=self.retention, least=self.least_retention)


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """Figures of a training; guesses are measured on held-out texts, see `measured`."""

    temperatures: tuple[float, ...]  # [K]
    hit_rates: tuple[float, ...]  # [K] share of origins at which this guess and all before it are right
    losses: tuple[float, ...]  # [K] nats per guess, at these temperatures
    num_trained: int  # trained positions, of the text and of masks
    num_without_drop: int  # trained positions of the same run without conditional drop
    num_steps: int

    @property
    def mean_guesses(self) -> float:
        """Mean number of right guesses in a pass before its first error, of K."""
        return sum(self.hit_rates)

    def figures(self) -> dict[str, Any]:
        """Return these figures by name, for the model's folder."""
        rounded = {name: [round(one, 4) for one in getattr(self, name)] for name in ("hit_rates", "losses")}
        counts = {"trained_positions": self.num_trained, "positions_without_drop": self.num_without_drop}
        return {**rounded, **counts, "steps": self.num_steps}


def train_pard(
    model: PreTrainedModel,
    documents: Sequence[Document],
    mask_id: int,
    settings: PardTrainSettings,
    *,
    checkpoint: Checkpoint,
    teacher: Teacher | None = None,
    on_step: Callable[[int, int], None] = lambda step, num_steps: None,
) -> TrainedDrafter:
    """Adapt ``model`` in place, from the last checkpoint if there is one.

    Args:
        model: float32 weights, whose embedding has a row for ``mask_id``.
        checkpoint: stores the state every few steps, and refuses that of another run.
        teacher: gives the guesses' weights and target distributions (PARD-2); None learns only the texts.
            The layer that reads its states, if there is one, learns, too.
        on_step: called at the start and after each step, with the completed and the total number of steps.
    Raises: PromptError for fewer than two documents; ModelError for a checkpoint that is damaged or of another run.
    """
    learnt, held_out = split(documents, settings.seed)
    steps = planned(learnt, settings)
    rate = settings.learning_rate or _usual_rate(model)

    def loss_in_step(step: int, some: Sequence[Document]) -> StepLoss:
        rows = rows_of_step(some, step, mask_id, settings)
        loss = loss_of(model, batch_of(rows), teacher, shown_in_step(len(rows), step, settings))
        undropped = sum(num_without_drop(document, settings) for document in some)
        return StepLoss(loss, sum(row.num_trained for row in rows), undropped)

    whole = _with_state_input(model, teacher).requires_grad_(True)
    _, state = fit(
        whole,
        steps,
        loss_in_step,
        FitRule(learning_rate=rate, weight_decay=0.0, checkpoint_steps=settings.checkpoint_steps),
        num_steps=len(steps),
        facts=run_facts(learnt, mask_id, settings, teacher),
        checkpoint=checkpoint,
        on_step=on_step,
    )
    whole.requires_grad_(False)
    guesses = measured(model, held_out, mask_id, settings, teacher)
    return TrainedDrafter(*guesses, state.num_trained, state.num_without_drop, len(steps))


def _usual_rate(model: PreTrainedModel) -> float:
    """Return the published rate, for models of 0.5 B parameters and more, or a larger one for a tiny model."""
    return _TINY_RATE if sum(one.numel() for one in model.parameters()) < TINY_SIZE else _PUBLISHED_RATE


def _with_state_input(model: PreTrainedModel, teacher: Teacher | None) -> torch.nn.Module:
    """Return a module of everything that learns."""
    state_input = None if teacher is None else teacher.state_input
    return model if state_input is None else torch.nn.ModuleList([model, state_input])


# ---- the order of training -------------------------------------------------------------------------------------------


def split(documents: Sequence[Document], seed: int) -> tuple[list[Document], list[Document]]:
    """Return training documents and a few held-out ones. Raises: PromptError for fewer than two."""
    usable = [document for document in documents if len(document.token_ids) > document.first]
    if len(usable) < 2:
        raise PromptError(f"{len(usable)} texts have two tokens or more; give at least 2, one of them to measure by")
    shuffled = random.Random(f"{seed}/split").sample(usable, len(usable))
    num_held_out = max(1, min(_MOST_HELD_OUT, round(_HELD_OUT_SHARE * len(usable))))
    return shuffled[num_held_out:], shuffled[:num_held_out]


def planned(documents: Sequence[Document], settings: PardTrainSettings) -> list[list[Document]]:
    """Return the documents of every step: steps of documents of similar length, in random order."""
    steps: list[list[Document]] = []
    for epoch in range(settings.epochs):
        rng = random.Random(f"{settings.seed}/{epoch}")
        by_length = sorted(documents, key=lambda document: packed_length(document, settings) + rng.random())
        batches: list[list[Document]] = [[]]
        for document in by_length:
            num_tokens = packed_length(document, settings) * (len(batches[-1]) + 1)
            if batches[-1] and num_tokens > settings.tokens_per_step:
                batches.append([])
            batches[-1].append(document)
        rng.shuffle(batches)
        steps += batches
    return steps


def packed_length(document: Document, settings: PardTrainSettings) -> int:
    """Return the approximate number of tokens in the row of a document."""
    num_origins = len(document.token_ids) - document.first
    shares = sum(settings.drop.share(offset) for offset in range(1, settings.num_tokens))
    return len(document.token_ids) + round(num_origins * shares)


def num_without_drop(document: Document, settings: PardTrainSettings) -> int:
    """Return the number of tokens in the row of a document without dropped masks."""
    num_origins = len(document.token_ids) - document.first
    return len(document.token_ids) + sum(max(0, num_origins - offset) for offset in range(1, settings.num_tokens))


def rows_of_step(
    documents: Sequence[Document], step: int, mask_id: int, settings: PardTrainSettings
) -> list[PackedRow]:
    """Return the rows of a step; their masks depend only on the seed and the step."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    return [packed_row(one, kept_origins(one, settings.drop, generator), mask_id) for one in documents]


def shown_in_step(num_rows: int, step: int, settings: PardTrainSettings) -> Tensor:
    """Return which rows of a step are read with the target's states, [B] bool; it depends only on seed and step."""
    generator = torch.Generator().manual_seed(-1 - settings.seed * 1_000_003 - step)
    return torch.rand(num_rows, generator=generator) >= settings.state_drop


def run_facts(
    documents: Sequence[Document], mask_id: int, settings: PardTrainSettings, teacher: Teacher | None = None
) -> Mapping[str, Any]:
    """Return the facts that a run must share with the run that it resumes."""
    data = [[document.first, *document.token_ids] for document in documents]
    state_input = None if teacher is None else teacher.state_input
    layers = list(state_input.layers) if state_input is not None else []
    return {**asdict(settings), "mask token": mask_id, "data": data, "layers of the target": layers}


# ---- loss and measurement --------------------------------------------------------------------------------------------


def hidden_of(model: PreTrainedModel, batch: PackedBatch, added: Tensor | None = None) -> Tensor:
    """Return the last hidden states at the tokens that have a label, [M, D].

    Args:
        added: [B, S, D] to the embeddings, see `added_to`.
    """
    read = {"input_ids": batch.token_ids}
    if added is not None:
        table: Any = model.get_input_embeddings()
        own_scale = float(getattr(table, "embed_scale", 1.0))  # of models whose table scales its output
        read = {"inputs_embeds": table(batch.token_ids) + own_scale * added}
    output = model.base_model(**read, attention_mask=batch.attention, position_ids=batch.positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state[batch.labels != IGNORED]
    return hidden


def added_to(batch: PackedBatch, lesson: Lesson, teacher: Teacher, shown: Tensor | None = None) -> Tensor | None:
    """Return the addition of the target's states to the embeddings of a batch, [B, S, D]; None without such states.

    A token's addition comes from the states from which it was chosen, at the place before it. The first token and
    masks have none.

    Args:
        shown: [B] bool, rows that are read with states; None: all.
    """
    if teacher.state_input is None or lesson.states is None:
        return None
    width = lesson.states.shape[1]
    added = functional.pad(teacher.state_input(lesson.states[:, :-1]), (0, 0, 1, 0))
    is_read = batch.offsets[:, :width] == 0
    if shown is not None:
        is_read = is_read & shown[:, None]
    return functional.pad(added * is_read[..., None], (0, 0, 0, batch.token_ids.shape[1] - width))


def loss_of(
    model: PreTrainedModel, batch: PackedBatch, teacher: Teacher | None = None, shown: Tensor | None = None
) -> Tensor:
    """Return the mean loss over all kept tokens of the text and masks, in nats.

    It is the cross-entropy of the text, or `Lesson.loss` with a teacher; ``shown`` as of `added_to`.
    """
    with precision_of(model):
        lesson = None if teacher is None else teacher.lesson(batch)
        added = None if teacher is None or lesson is None else added_to(batch, lesson, teacher, shown)
        hidden, labels = hidden_of(model, batch, added), batch.labels[batch.labels != IGNORED]
        losses: list[Tensor] = []
        for start in range(0, len(labels), _BLOCK_ROWS):
            rows = slice(start, start + _BLOCK_ROWS)
            logits = logits_of(model, hidden[rows])
            if lesson is None:
                losses.append(functional.cross_entropy(logits, labels[rows], reduction="sum"))
            else:
                losses.append(lesson.loss(logits, labels[rows], rows))
    return torch.stack(losses).sum() / len(labels)


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states, [M, V] float32."""
    head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits: Tensor = head(hidden)
    return logits.float()


def precision_of(model: PreTrainedModel) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which passes compute in bfloat16, if the device is fast at it."""
    if not computes_bfloat16(model.device):
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, torch.bfloat16)


def measured(
    model: PreTrainedModel,
    documents: Sequence[Document],
    mask_id: int,
    settings: PardTrainSettings,
    teacher: Teacher | None = None,
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return temperatures, hit rates and losses of the K guesses, as in `TrainedDrafter`.

    A guess is right if it is the token of the text; with a teacher, if it is the target's own choice there.
    """
    num_tokens, whole = settings.num_tokens, Drop(num_tokens=settings.num_tokens, retention=1.0)
    losses = torch.zeros(num_tokens, len(_TEMPERATURES), dtype=torch.float64)
    counts, hits = (torch.zeros(num_tokens, dtype=torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for document in documents:
        batch = batch_of([packed_row(document, kept_origins(document, whole, generator), mask_id)])
        is_learnt = batch.labels != IGNORED
        labels, offsets, origins = (part[is_learnt] for part in (batch.labels, batch.offsets, batch.origins))
        with torch.no_grad(), precision_of(model):
            lesson = None if teacher is None else teacher.lesson(batch)
            added = None if teacher is None or lesson is None else added_to(batch, lesson, teacher)
            logits = logits_of(model, hidden_of(model, batch, added))
            if lesson is not None:
                labels = lesson.logits.argmax(-1)
        for idx, temperature in enumerate(_TEMPERATURES):
            loss = functional.cross_entropy(logits / temperature, labels, reduction="none").double()
            losses[:, idx].index_add_(0, offsets, loss)
        counts.index_add_(0, offsets, torch.ones(len(labels), dtype=torch.float64))
        is_right = torch.ones(num_tokens, len(document.token_ids), dtype=torch.bool)
        is_right[offsets, origins] = logits.argmax(-1) == labels
        right = is_right.cumprod(0)[offsets, origins].double()
        hits.index_add_(0, offsets, right)
    best = losses.argmin(1)
    least = losses.gather(1, best[:, None])[:, 0] / counts.clamp_min(1)
    temperatures = tuple(_TEMPERATURES[idx] for idx in best.tolist())
    return temperatures, tuple((hits / counts.clamp_min(1)).tolist()), tuple(least.tolist())
