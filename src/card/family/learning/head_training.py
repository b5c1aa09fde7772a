"""Steps of trainings of drafting heads: which texts are learnt from, the order of batches, and the steps themselves.

Every batch follows from the settings and the data, so a run that goes on from a checkpoint ends with the weights of one
that was never cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from card.config.fields import require
from card.errors import PromptError
from card.family.learning.checkpoint import Checkpoint, RunState, rate_share
from card.family.learning.target_texts import TargetTexts
from card.models.head_files import DraftingHead, round_weights
from card.tree.nodes import ROOT, Nodes

IGNORED = -100  # label of a token that a head lacks
_HELD_OUT_SHARE = 0.05
_CLIPPED_NORM = 1.0
_MOST_TOKENS = 8192  # that a head proposes: the target's commonest


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Settings of the steps of a training."""

    epochs: int
    batch_size: int  # examples
    learning_rate: float = 2e-3  # at its peak
    seed: int = 0
    checkpoint_steps: int = 50  # from one checkpoint to the next

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("epochs", "batch_size", "checkpoint_steps"):
            require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))


_Head = TypeVar("_Head", bound=DraftingHead)


@dataclass(frozen=True, slots=True)
class TrainedHead(Generic[_Head]):
    """A head and its figures, counted on texts that it did not learn from."""

    head: _Head
    losses: tuple[float, ...]  # of each step that this run made
    accepted: tuple[float, ...]  # share of rows behind which the first so many tokens were all among the candidates
    num_candidates: int  # in each of these trees
    num_trained: int  # rows or texts learnt from, in all steps
    num_steps: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a target pass commits with these candidates, its own included."""
        return 1.0 + sum(self.accepted)

    def figures(self) -> dict[str, str]:
        """Return what is worth keeping beside the head, by name."""
        return {
            "tokens_per_step": f"{self.tokens_per_step:.3f}",
            "accepted_by_depth": " ".join(f"{share:.3f}" for share in self.accepted),
            "candidates": str(self.num_candidates),
            "trained": str(self.num_trained),
            "steps": str(self.num_steps),
        }


def split_texts(texts: TargetTexts, seed: int) -> tuple[list[int], list[int]]:
    """Return the texts to learn from and those to measure by. Raises: PromptError for fewer than two."""
    usable = [idx for idx in range(len(texts)) if texts.starts[idx + 1] - texts.answer(idx) > 1]
    if len(usable) < 2:
        raise PromptError(f"{len(usable)} answers have two tokens or more; give 2 prompts at least, or longer answers")
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed)).tolist()
    num_held_out = max(1, round(_HELD_OUT_SHARE * len(usable)))
    chosen = [usable[i] for i in order]
    return chosen[num_held_out:], chosen[:num_held_out]


def planned(num_examples: int, settings: FitSettings) -> list[Tensor]:
    """Return the examples of every step, each epoch in an order of its own."""
    steps: list[Tensor] = []
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        steps += torch.split(torch.randperm(num_examples, generator=generator), settings.batch_size)
    return steps


def common_tokens(token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the commonest tokens of texts in ascending order, [N], and each token's place among them, [vocab_size].

    The place of others is `IGNORED`.
    """
    found, counts = torch.unique(token_ids, return_counts=True)
    chosen = found[counts.argsort(descending=True, stable=True)[:_MOST_TOKENS]].sort().values
    label_of = torch.full((vocab_size,), IGNORED)
    label_of[chosen] = torch.arange(len(chosen))
    return chosen, label_of


def fit(
    head: nn.Module,
    steps: Sequence[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    settings: FitSettings,
    *,
    facts: Mapping[str, Any],
    checkpoint: Checkpoint,
    on_step: Callable[[int, int], None],
) -> tuple[list[float], RunState]:
    """Train a head by these steps, from the last checkpoint on if there is one; its weights are as in a file then.

    Args:
        loss_of: returns the mean loss of the examples of a step.
        facts: of the run, which a checkpoint has to share.
        on_step: called at the start and after each step with the steps done and their number.
    Returns: the losses of the steps that this call made, and what all of them have trained.
    Raises: ModelError for a checkpoint that is damaged or of another run.
    """
    optimizer = torch.optim.AdamW(head.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    state = checkpoint.load(head, optimizer, facts)
    losses: list[float] = []
    on_step(state.step, len(steps))
    for step in range(state.step, len(steps)):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate_share(step, len(steps))
        loss = loss_of(steps[step])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), _CLIPPED_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state.step, state.num_trained = step + 1, state.num_trained + len(steps[step])
        if state.step % settings.checkpoint_steps == 0 or state.step == len(steps):
            checkpoint.save(head, optimizer, facts, state)
        on_step(state.step, len(steps))
    head.requires_grad_(False)
    round_weights(head)
    return losses, state


def num_right(tree: Nodes, token_ids: Sequence[int]) -> int:
    """Return how many of the tokens a path of the tree has, from its top down."""
    child_of = {pair: idx for idx, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, depth = ROOT, 0
    for token in token_ids:
        child = child_of.get((node, token))
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
