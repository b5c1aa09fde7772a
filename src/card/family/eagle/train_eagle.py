"""Train an EAGLE-3 head on a target's own texts: three steps unrolled, against the target's distributions.

Source: EAGLE-3, arXiv:2503.01840; the distributions over the head's tokens, and rows whose token it lacks left out, as
in SpecForge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from card.backends.transformers.arrays import as_tensor
from card.config.fields import require
from card.family.eagle.head import EagleModule, EagleSizes
from card.family.learning.driver import TrainingTarget
from card.family.learning.head_training import IGNORED, FitSettings, TrainedHead, split_texts, train_on
from card.family.learning.target_texts import TargetTexts
from card.family.learning.unrolling import MEASURED_STEPS, STEP_WEIGHT, ChainCounts, of_the_row_before, seen_in
from card.kernels.number_types import Floats
from card.kernels.packed_linear import multiply_rows
from card.models.draft_vocab import always_drafted, first_used
from card.models.own.decoder_model import DecoderModel
from card.models.own.exact_layers import norm_weight
from card.models.own.layers import BlockWeight
from card.models.runner import ExactRunner
from card.text.tokenizer import Tokenizer

_MLP_RATIO, _MLP_MULTIPLE = 8 / 3, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainSettings(FitSettings):
    """Settings of the training."""

    num_steps: int = 3  # unrolled
    num_tokens: int = 16_384  # that it proposes at most
    mlp_width: int | None = None  # None: 8/3 of the target's width
    epochs: int = 2
    batch_size: int = 4  # texts
    learning_rate: float = 5e-4
    checkpoint_steps: int = 10  # a step of a large target takes half a minute on two cores

    def __post_init__(self) -> None:
        FitSettings.__post_init__(self)
        require(self.num_steps >= 1, "num_steps", "1 or more", self.num_steps)
        require(self.num_tokens >= 1, "num_tokens", "1 or more", self.num_tokens)


@dataclass(frozen=True, slots=True)
class EagleBatch:
    """Rows of B texts, T of the longest, padded at their ends; a row holds a token and the state before it."""

    states: Tensor  # [B, T, layers * D]
    embeddings: Tensor  # [B, T, D]
    labels: Tensor  # [B, T] int64: place among the head's tokens of the next one; `IGNORED` if it is not learnt
    final: Tensor  # [B, T, D] the target's last state, from which the next token was chosen


class EagleExamples:
    """Texts as a head reads them."""

    def __init__(
        self,
        texts: TargetTexts,
        chosen: Sequence[int],
        embeddings: Callable[[Sequence[int]], Floats],
        label_of: Tensor,
    ) -> None:
        """Take some texts.

        Args:
            embeddings: returns those of tokens, [n, D].
            label_of: [V] int64, place of each token among the head's; `IGNORED` of others.
        """
        self._texts, self.chosen, self._embeddings, self._label_of = texts, list(chosen), embeddings, label_of

    def __len__(self) -> int:
        return len(self.chosen)

    def num_learnt(self, idx: int) -> int:
        """Return how many tokens of a text are learnt."""
        return self._texts.num_learnt(self.chosen[idx])

    def batch(self, some: Tensor) -> EagleBatch:
        """Return the texts with these indices [n]."""
        columns = zip(*(self._text(self.chosen[i]) for i in some.tolist()), strict=True)
        states, embeddings, labels, final = (list(one) for one in columns)
        pad = torch.nn.utils.rnn.pad_sequence
        return EagleBatch(
            pad(states, batch_first=True),
            pad(embeddings, batch_first=True),
            pad(labels, batch_first=True, padding_value=IGNORED),
            pad(final, batch_first=True),
        )

    def _text(self, idx: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        texts, rows = self._texts, self._texts.text(idx)
        token_ids = texts.token_ids[rows]
        embeddings = as_tensor(self._embeddings(token_ids.tolist()))
        features, width = texts.features[rows].float(), embeddings.shape[1]
        states, final = features[:, :-width], features[:, -width:]
        first = max(texts.answer(idx) - rows.start, 1)
        labels = torch.full(token_ids.shape, IGNORED)
        labels[first - 1 : -1] = self._label_of[token_ids[first:]]
        return states, embeddings, labels, final.roll(-1, 0)


def target_layers(num_layers: int) -> tuple[int, ...]:
    """Return the states that a head reads, as transformers' ``hidden_states`` count them: low, middle, high."""
    return min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, num_layers // 2)


def train_eagle(
    target: TrainingTarget, texts: TargetTexts, settings: EagleTrainSettings, **run: Any
) -> TrainedHead[EagleModule]:
    """Train a head for a target that runs in our own pass.

    Args:
        texts: with their prompts, and with the states of `target_layers` and the last one.
        run: and errors, as of `card.family.learning.head_training.train_on`.
    """
    chosen = split_texts(texts, settings.seed)
    head = new_head(target, texts, settings)
    label_of = torch.full((head.sizes.vocab_size,), IGNORED)
    label_of[head.token_ids] = torch.arange(len(head.token_ids))
    learnt, held_out = (EagleExamples(texts, some, target.runner.embeddings, label_of) for some in chosen)
    return train_on(
        head,
        learnt,
        held_out,
        lambda head, examples, some: loss_of(head, examples.batch(some), settings.num_steps),
        accepted_by_depth,
        settings=settings,
        texts=texts,
        num_candidates=MEASURED_STEPS,
        **run,
    )


def new_head(target: TrainingTarget, texts: TargetTexts, settings: EagleTrainSettings) -> EagleModule:
    """Return an untrained head."""
    runner, model = target.runner, target.model
    assert isinstance(runner, ExactRunner) and isinstance(model, DecoderModel)
    width = runner.original.hidden_size
    sizes = EagleSizes(
        width=width,
        mlp_width=settings.mlp_width or round(_MLP_RATIO * width / _MLP_MULTIPLE) * _MLP_MULTIPLE,
        vocab_size=runner.num_embeddings,
        target_layers=target_layers(runner.original.num_layers),
    )
    token_ids = proposed_tokens(texts, target.tokenizer, settings.num_tokens, runner.vocab_size)
    norm = norm_weight(model.norm, model.architecture.norm_offset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return EagleModule(sizes, token_ids, as_tensor(_head_rows(model, token_ids.tolist())), as_tensor(norm))


def proposed_tokens(texts: TargetTexts, tokenizer: Tokenizer, num_tokens: int, vocab_size: int) -> Tensor:
    """Return the tokens that a head proposes, [N] in ascending order.

    Those that begin and end texts come first, then those of the answers by their counts, then what texts use most.
    """
    answers = [texts.token_ids[texts.answer(idx) : texts.text(idx).stop] for idx in range(len(texts))]
    distinct, counts = torch.unique(torch.cat(answers), return_counts=True)
    counted = distinct[counts.argsort(descending=True, stable=True)].tolist()
    ranked = [*always_drafted(tokenizer), *counted, *first_used(tokenizer.get_vocab(), vocab_size)]
    known = dict.fromkeys(one for one in ranked if one < vocab_size)
    return torch.tensor(sorted(list(known)[:num_tokens]))


def _head_rows(model: DecoderModel, token_ids: list[int]) -> Floats:
    chosen = model.lm_head.select(np.array(token_ids))
    if not isinstance(chosen.weight, BlockWeight):
        return chosen.weight.astype(np.float32)
    one = np.eye(chosen.weight.shape[1], dtype=np.float32)  # blocks are packed for products alone
    return np.ascontiguousarray(multiply_rows(one, chosen.blocks_packed())[:, : len(token_ids)].T)


def loss_of(head: EagleModule, batch: EagleBatch, num_steps: int) -> Tensor:
    """Return the loss of all unrolled steps, in nats per learnt token; later steps have less weight."""
    total, places = torch.zeros(()), torch.arange(batch.labels.shape[1])
    is_learnt = batch.labels != IGNORED
    wanted = (batch.final[is_learnt] @ head.table.T).softmax(-1)
    for step, states in enumerate(unrolled(head, batch, num_steps)):
        is_reached = (places >= step).expand_as(is_learnt)
        if (is_learnt & is_reached).any():
            logprobs = head.logits(states[is_learnt & is_reached]).log_softmax(-1)
            losses = -(wanted[is_reached[is_learnt]] * logprobs).sum(-1)
            total = total + STEP_WEIGHT**step * losses.mean()
        else:
            total = total + 0.0 * states.sum()
    return total


def unrolled(head: EagleModule, batch: EagleBatch, num_steps: int) -> Iterator[Tensor]:
    """Yield the states behind a batch's rows in each step, [B, T, D]; see `card.family.learning.unrolling`."""
    num_rows = batch.labels.shape[1]
    places = torch.arange(num_rows)[None]
    states, attention = head.joined(batch.states), head.midlayer.self_attn
    keys, values = list[Tensor](), list[Tensor]()
    for step in range(num_steps):
        if step:
            states = of_the_row_before(states)
        read = head.read(states, batch.embeddings)
        for cached, new in zip((keys, values), attention.memory(read, places), strict=True):
            cached.append(new)
        seen = seen_in(step, num_rows)
        states = head.combined(states, attention(read, places, torch.cat(keys, 2), torch.cat(values, 2), seen))
        yield states


@torch.inference_mode()
def accepted_by_depth(head: EagleModule, examples: EagleExamples, num_steps: int) -> tuple[float, ...]:
    """Return, for k = 1 to ``num_steps``, the share of rows whose next k tokens a chain has right, in [0, 1]."""
    counts = ChainCounts(num_steps)
    for idx in range(len(examples)):
        batch = examples.batch(torch.tensor([idx]))
        rows = slice(batch.labels.shape[1] - 1 - examples.num_learnt(idx), -1)
        guesses = (head.logits(states[0, rows]).argmax(-1) for states in unrolled(head, batch, num_steps))
        counts.add(guesses, batch.labels[0, rows])
        if counts.is_enough:
            break
    return counts.shares
