"""The loop of all trainings: examples that are drawn when they are asked for, and runs that go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from card.family.learning.checkpoint import Checkpoint
from card.family.learning.fit import FitRule, StepLoss, fit

RULE = FitRule(learning_rate=0.1, weight_decay=0.0, checkpoint_steps=2)
NUM_STEPS = 7


def new_model() -> nn.Linear:
    model = nn.Linear(3, 1)
    for weight in model.parameters():
        nn.init.constant_(weight, 0.5)
    return model


def drawn(seen: list[float], model: nn.Linear) -> Iterator[Tensor]:
    """Yield examples of one generator, and note a weight whenever one is asked for."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        seen.append(float(model.weight.detach()[0, 0]))
        yield torch.randn(4, 3, generator=generator)


def trained(checkpoint: Checkpoint | None = None, stop_after: int | None = None) -> tuple[nn.Linear, list[float], int]:
    model, seen = new_model(), list[float]()

    def on_step(step: int, num_steps: int) -> None:
        assert num_steps == NUM_STEPS
        if step == stop_after:
            raise InterruptedError

    _, state = fit(
        model,
        drawn(seen, model),
        lambda _, some: StepLoss(model(some).square().mean(), len(some)),
        RULE,
        num_steps=NUM_STEPS,
        checkpoint=checkpoint,
        on_step=on_step,
    )
    return model, seen, state.num_trained


def test_examples_are_asked_for_when_the_step_before_has_moved_the_weights() -> None:
    model, seen, num_trained = trained()
    assert len(set(seen)) == NUM_STEPS and float(model.weight.detach()[0, 0]) not in seen
    assert num_trained == 4 * NUM_STEPS


@pytest.mark.parametrize("stop_after", [3, 4, 7])
def test_drawn_examples_of_steps_that_are_done_are_drawn_again_so_that_the_weights_are_those_of_one_run(
    tmp_path: Path, stop_after: int
) -> None:
    whole, _, num_whole = trained()
    checkpoint = Checkpoint(tmp_path / "training.pt", {})
    with pytest.raises(InterruptedError):
        trained(checkpoint, stop_after)
    model, seen, num_trained = trained(checkpoint)
    kept = NUM_STEPS if stop_after == NUM_STEPS else stop_after - stop_after % 2
    assert (len(set(seen)), num_trained, len(seen)) == (max(1, NUM_STEPS - kept), num_whole, NUM_STEPS)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), whole.parameters(), strict=True))
