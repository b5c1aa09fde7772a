"""The loop of all trainings: schedule, optimizer, checkpoints and progress.

Every step of a run is determined by the settings and the data. So a resumed run ends with the weights of an
uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from card.family.learning.checkpoint import Checkpoint, RunState

_WARM_UP_SHARE, _LEAST_RATE = 0.05, 0.05  # of the steps; of the learning rate, at the end

_Examples = TypeVar("_Examples")


def rate_share(step: int, num_steps: int) -> float:
    """Return the share of the learning rate's peak: linear up, then linear down to a small one."""
    warm_up = max(1, round(_WARM_UP_SHARE * num_steps))
    left = (num_steps - step) / max(1, num_steps - warm_up)
    return min((step + 1) / warm_up, max(_LEAST_RATE, left), 1.0)


def constant_rate(step: int, num_steps: int) -> float:
    """Return the same learning rate at every step."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRule:
    """Update of the weights in a step (AdamW), and the period of checkpoints."""

    learning_rate: float  # at its peak
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Callable[[int, int], float] = rate_share  # share of the rate, from step and number of steps
    clipped_norm: float | None = 1.0  # largest norm of a gradient; None: unlimited
    checkpoint_steps: int = 50  # from one checkpoint to the next


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Loss of a step, and the counts of its examples."""

    loss: Tensor  # mean, nats
    num_trained: int = 0  # as in `RunState`
    num_without_drop: int = 0


def fit(
    model: nn.Module,
    steps: Iterable[_Examples],
    loss_of: Callable[[int, _Examples], StepLoss],
    rule: FitRule,
    *,
    num_steps: int,
    facts: Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    on_step: Callable[[int, int], None] = lambda step, num_steps: None,
) -> tuple[list[float], RunState]:
    """Train a model, from the last checkpoint if there is one.

    Args:
        steps: the examples of each step, which may be drawn lazily. A resumed run iterates over completed steps, too.
            After an update the iterator is advanced, so it may look at the new weights.
        loss_of: returns the loss of a step, from its number (from 0) and its examples.
        num_steps: most steps.
        facts: of the run; a checkpoint must have the same.
        checkpoint: stores the state every few steps; None: nothing is stored.
        on_step: called at the start and after each step, with the completed and the total number of steps.
    Returns: the losses of this call's steps, and the state after all steps.
    Raises: ModelError for a checkpoint that is damaged or of another run.
    """
    model.train(True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rule.learning_rate, betas=rule.betas, weight_decay=rule.weight_decay
    )
    state = RunState() if checkpoint is None else checkpoint.load(model, optimizer, facts or {})
    losses: list[float] = []
    on_step(state.step, num_steps)
    for step, examples in enumerate(steps):
        if step < state.step:
            continue
        for group in optimizer.param_groups:
            group["lr"] = rule.learning_rate * rule.schedule(step, num_steps)
        result = loss_of(step, examples)
        result.loss.backward()  # type: ignore[no-untyped-call]
        if rule.clipped_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), rule.clipped_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
        state.step, state.num_trained = step + 1, state.num_trained + result.num_trained
        state.num_without_drop += result.num_without_drop
        is_due = state.step % rule.checkpoint_steps == 0 or state.step == num_steps
        if checkpoint is not None and is_due:
            checkpoint.save(model, optimizer, facts or {}, state)
        on_step(state.step, num_steps)
    model.train(False)
    return losses, state
