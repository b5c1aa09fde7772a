"""The training of drafting heads: the split of texts, the order of batches, figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from card.backends.transformers.arrays import as_tensor
from card.config.fields import require
from card.errors import PromptError
from card.family.learning.bound_module import DraftingHead, SavedHead, round_weights
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.fit import FitRule, StepLoss, fit
from card.family.learning.target_texts import TargetTexts
from card.models.fingerprint import embedding_probe, sizes_of
from card.models.runner import RowRunner
from card.tree.nodes import ROOT, Nodes

IGNORED = -100  # label of a token that a head lacks
_HELD_OUT_SHARE = 0.05
_WEIGHT_DECAY = 0.01
_MOST_TOKENS = 8192  # of a head's vocabulary: the target's commonest


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Settings of a training's steps."""

    epochs: int
    batch_size: int  # examples
    learning_rate: float = 2e-3  # at its peak
    seed: int = 0
    checkpoint_steps: int = 50  # from one checkpoint to the next

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "checkpoint_steps"):
            require(getattr(self, name) >= 1, name, "1 or more", getattr(self, name))


_Head = TypeVar("_Head", bound=SavedHead)
_BoundHead = TypeVar("_BoundHead", bound=DraftingHead)
_Examples = TypeVar("_Examples", bound=Sized)


@dataclass(frozen=True, slots=True)
class TrainedHead(Generic[_Head]):
    """A head and its figures on held-out texts."""

    head: _Head
    losses: tuple[float, ...]  # of each step of this run
    accepted: tuple[float, ...]  # [k - 1] share of rows whose next k tokens were all among the candidates
    num_candidates: int  # in each tree
    num_trained: int  # rows or texts, over all steps
    num_steps: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a target pass commits with these candidates, its own included."""
        return 1.0 + sum(self.accepted)

    def figures(self) -> dict[str, str]:
        """Return these figures by name, for a file's metadata."""
        return {
            "tokens_per_step": f"{self.tokens_per_step:.3f}",
            "accepted_by_depth": " ".join(f"{share:.3f}" for share in self.accepted),
            "candidates": str(self.num_candidates),
            "trained": str(self.num_trained),
            "steps": str(self.num_steps),
        }


def split_texts(texts: TargetTexts, seed: int) -> tuple[list[int], list[int]]:
    """Return the texts to learn from and the held-out ones. Raises: PromptError for fewer than two."""
    usable = [idx for idx in range(len(texts)) if texts.starts[idx + 1] - texts.answer(idx) > 1]
    if len(usable) < 2:
        raise PromptError(f"{len(usable)} answers have two tokens or more; give 2 prompts at least, or longer answers")
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed)).tolist()
    num_held_out = max(1, round(_HELD_OUT_SHARE * len(usable)))
    chosen = [usable[i] for i in order]
    return chosen[num_held_out:], chosen[:num_held_out]


def planned(num_examples: int, settings: FitSettings) -> list[Tensor]:
    """Return the examples of every step, in a new order for each epoch."""
    steps: list[Tensor] = []
    for epoch in range(settings.epochs):
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        steps += torch.split(torch.randperm(num_examples, generator=generator), settings.batch_size)
    return steps


def common_tokens(token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the commonest tokens of texts in ascending order, [N], and each token's place among them, [vocab_size].

    The place of other tokens is `IGNORED`.
    """
    distinct, counts = torch.unique(token_ids, return_counts=True)
    chosen = distinct[counts.argsort(descending=True, stable=True)[:_MOST_TOKENS]].sort().values
    label_of = torch.full((vocab_size,), IGNORED)
    label_of[chosen] = torch.arange(len(chosen))
    return chosen, label_of


def train(
    kind: type[_BoundHead],
    head_facts: Mapping[str, Any],
    examples_of: Callable[[Sequence[int], Tensor, Tensor], _Examples],
    loss_of: Callable[[_BoundHead, _Examples, Tensor], Tensor],
    accepted: Callable[[_BoundHead, _Examples, int], tuple[float, ...]],
    *,
    target: RowRunner,
    texts: TargetTexts,
    settings: FitSettings,
    **run: Any,
) -> TrainedHead[_BoundHead]:
    """Train a head that proposes the target's commonest tokens by its embeddings.

    Args:
        head_facts: facts of the head besides the target's sizes.
        examples_of: returns the examples of some texts, from embeddings [M, D] of all tokens, and places of tokens as
            of `common_tokens`.
        run: further arguments of `train_on`, which says what raises.
    """
    chosen = split_texts(texts, settings.seed)
    token_ids, label_of = common_tokens(texts.token_ids, target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = kind(kind.FACTS(**head_facts, **sizes_of(target)), token_ids, as_tensor(embedding_probe(target)))
    head.attach(target)
    embeddings = as_tensor(target.embeddings(texts.token_ids.tolist()))
    learnt, held_out = (examples_of(some, embeddings, label_of) for some in chosen)
    return train_on(head, learnt, held_out, loss_of, accepted, settings=settings, texts=texts, **run)


def train_on(
    head: _Head,
    learnt: _Examples,
    held_out: _Examples,
    loss_of: Callable[[_Head, _Examples, Tensor], Tensor],
    accepted: Callable[[_Head, _Examples, int], tuple[float, ...]],
    *,
    settings: FitSettings,
    texts: TargetTexts,
    checkpoint: Checkpoint,
    num_candidates: int = 16,
    on_step: Callable[[int, int], None] = lambda step, num_steps: None,
) -> TrainedHead[_Head]:
    """Train a head, from the last checkpoint if there is one; measure it with its weights as in a file.

    Args:
        learnt, held_out: examples, of all of `texts` together.
        loss_of: returns the mean loss of some examples, by their indices [n].
        accepted: returns `TrainedHead.accepted` for trees of a number of candidates.
        checkpoint, on_step: as of `fit`.
        num_candidates: of the measured trees.
    Raises: PromptError for fewer than two texts; ModelError for a checkpoint that is damaged or of another run.
    """
    steps = planned(len(learnt), settings)
    losses, state = fit(
        head,
        steps,
        lambda _, some: StepLoss(loss_of(head, learnt, some), len(some)),
        FitRule(
            learning_rate=settings.learning_rate, weight_decay=_WEIGHT_DECAY, checkpoint_steps=settings.checkpoint_steps
        ),
        num_steps=len(steps),
        facts={**asdict(settings), "texts": texts.digest},
        checkpoint=checkpoint,
        on_step=on_step,
    )
    head.requires_grad_(False)
    round_weights(head)
    shares = accepted(head, held_out, num_candidates)
    return TrainedHead(head, tuple(losses), shares, num_candidates, state.num_trained, len(steps))


def num_right(tree: Nodes, token_ids: Sequence[int]) -> int:
    """Return how many of the first tokens a path of the tree has."""
    child_of = {pair: idx for idx, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, depth = ROOT, 0
    for token in token_ids:
        child = child_of.get((node, token))
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
