"""Data for H-RAD: rounds of sequential speculation, each with what the target knew before it and how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from card.config import SamplingRule
from card.models.hrad.network import ALL_ACCEPTED, ALL_REJECTED, UNDECIDED
from card.models.protocol import Extension
from card.models.torch_runner import TorchRunner
from card.tree.sampling import CandidateScorer

BATCH = 32  # texts that are written side by side


@dataclass(frozen=True, slots=True)
class Rounds:
    """N rounds: what was known before each, and its outcome; on the CPU."""

    inputs: Tensor  # [N, (num_layers + 1) * D] in the target's dtype: features and embedding as `HRad` takes them
    num_accepted: Tensor  # [N] int64: from 0 to K
    confidences: Tensor  # [N, K] float32: the drafter's own probability of each token that it drafted
    prompt_idx: Tensor  # [N] int64: which prompt it came from

    def __len__(self) -> int:
        return len(self.num_accepted)

    @property
    def labels(self) -> Tensor:
        """Outcomes, [N] int64: one of CLASSES each."""
        return outcomes(self.num_accepted, self.num_drafted)

    @property
    def num_drafted(self) -> int:
        """K, length of the chains."""
        return self.confidences.shape[-1]

    def of_prompts(self, prompts: Tensor) -> Rounds:
        """Return the rounds of some prompts."""
        rows = torch.isin(self.prompt_idx, prompts)
        return Rounds(self.inputs[rows], self.num_accepted[rows], self.confidences[rows], self.prompt_idx[rows])


@dataclass(slots=True)
class _Text:
    """One text as it is written. The last token has no row in the target between rounds."""

    prompt_idx: int
    token_ids: list[int]
    num_prompt: int
    target_slot: int
    draft_slot: int
    features: Tensor  # [num_layers * D] of the row that gave the last token


_Round = tuple[Tensor, int, list[float], int]
"""One round, in the order of the fields of `Rounds`."""


class RoundCollector:
    """Answers prompts greedily by sequential speculation, several at a time, and keeps every round.

    The text is the target's own; the draft model only decides where rounds begin and how they end.
    """

    def __init__(
        self,
        target: TorchRunner,
        draft: TorchRunner,
        *,
        num_layers: int,
        num_speculative_tokens: int,
        max_tokens: int,
        end_ids: frozenset[int],
    ) -> None:
        """Take both models; the target keeps features of its last ``num_layers`` layers from now on.

        Args:
            max_tokens: new tokens after which a text is broken off.
            end_ids: tokens that end a text.
        Raises: ModelError if the target has fewer layers.
        """
        target.keep_features(num_layers)
        self._target, self._draft = target, draft
        self._num_drafted, self._max_tokens, self._end_ids = num_speculative_tokens, max_tokens, end_ids
        greedy = SamplingRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        self._scorer = CandidateScorer(greedy, draft.vocab_size, coupled=False)

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that leaves room for a round."""
        return min(self._target.max_model_len, self._draft.max_model_len) - self._num_drafted - 1

    def collect(self, prompts: Sequence[Sequence[int]], on_answer: Callable[[], None] = lambda: None) -> Rounds:
        """Answer all prompts and return the rounds in which the outcome is known.

        A round whose text ends within the accepted tokens is left out: nobody knows how the rest would have fared.

        Args:
            prompts: token ids, 1 to `max_prompt_tokens` each.
            on_answer: called after each answer.
        """
        found: list[_Round] = []
        waiting = list(enumerate(prompts))[::-1]
        running: list[_Text] = []
        while waiting or running:
            while waiting and len(running) < BATCH:
                running.append(self._begin(*waiting.pop()))
            active = [text for text in running if not self._is_done(text)]
            if active:
                self._round(active, found)
            for text in [text for text in running if self._is_done(text)]:
                running.remove(text)
                self._target.close(text.target_slot)
                self._draft.close(text.draft_slot)
                on_answer()
        columns = list(zip(*found, strict=True)) or [()] * 4
        inputs, num_accepted, confidences, prompt_idx = columns
        return Rounds(
            torch.stack(inputs) if found else torch.zeros((0, 0)),
            torch.tensor(num_accepted, dtype=torch.int64),
            torch.tensor(confidences, dtype=torch.float32).view(-1, self._num_drafted),
            torch.tensor(prompt_idx, dtype=torch.int64),
        )

    def _begin(self, prompt_idx: int, prompt: Sequence[int]) -> _Text:
        """Run a prompt and take its first token."""
        num_prompt = len(prompt)
        num_rows = num_prompt + self._max_tokens + self._num_drafted + 1
        target_slot = self._target.open(min(num_rows, self._target.max_rows))
        draft_slot = self._draft.open(min(num_rows, self._draft.max_rows))
        (logits,) = self._target.forward([Extension(target_slot, prompt, range(-1, num_prompt - 1), num_prompt - 1)])
        features = self._target.features(0)[0].cpu()
        return _Text(prompt_idx, [*prompt, int(logits[0].argmax())], num_prompt, target_slot, draft_slot, features)

    def _round(self, texts: Sequence[_Text], found: list[_Round]) -> None:
        """Draft for every text, verify, and commit what was accepted and the target's next token."""
        chains, confidences = self._draft_chains(texts)
        for text, chain, probs, (choices, features) in zip(
            texts, chains, confidences, self._verify(texts, chains), strict=True
        ):
            num_accepted = next((i for i, one in enumerate(chain) if one != choices[i]), len(chain))
            accepted = chain[:num_accepted]
            if not self._end_ids.intersection(accepted):
                embedding = self._target.embedding(text.token_ids[-1]).cpu()
                found.append((torch.cat((text.features, embedding)), num_accepted, probs, text.prompt_idx))
            num_rows = len(text.token_ids) + num_accepted
            self._target.keep(text.target_slot, num_rows)
            self._draft.keep(text.draft_slot, min(num_rows, self._draft.num_rows(text.draft_slot)))
            text.features = features[num_accepted].clone()
            text.token_ids += [*accepted, choices[num_accepted]]

    def _draft_chains(self, texts: Sequence[_Text]) -> tuple[list[list[int]], list[list[float]]]:
        """Return the chain drafted for each text, and how likely the drafter found each of its tokens."""
        chains: list[list[int]] = [[] for _ in texts]
        confidences: list[list[float]] = [[] for _ in texts]
        for _ in range(self._num_drafted):
            extensions = [
                _newest(self._draft, text.draft_slot, [*text.token_ids, *chain])
                for text, chain in zip(texts, chains, strict=True)
            ]
            logits = torch.cat(self._draft.forward(extensions))
            best, logprobs = self._scorer.top(logits, [0] * len(texts), 1)
            for i, (token_id, prob) in enumerate(zip(best[:, 0].tolist(), logprobs[:, 0].exp().tolist(), strict=True)):
                chains[i].append(token_id)
                confidences[i].append(prob)
        return chains, confidences

    def _verify(self, texts: Sequence[_Text], chains: Sequence[list[int]]) -> list[tuple[list[int], Tensor]]:
        """Return the target's token after each text and after each token of its chain, with the features of these
        rows, [1 + K, num_layers * D]."""
        extensions = [
            _newest(self._target, text.target_slot, [*text.token_ids, *chain], self._num_drafted)
            for text, chain in zip(texts, chains, strict=True)
        ]
        choices = [logits.argmax(-1).tolist() for logits in self._target.forward(extensions)]
        return [(choice, self._target.features(i).cpu()) for i, choice in enumerate(choices)]

    def _is_done(self, text: _Text) -> bool:
        written = text.token_ids[text.num_prompt :]
        is_full = len(text.token_ids) > self.max_prompt_tokens
        return is_full or len(written) >= self._max_tokens or not self._end_ids.isdisjoint(written)


def _newest(model: TorchRunner, slot: int, token_ids: Sequence[int], num_below: int = 0) -> Extension:
    """Return the tokens that have no row yet, with logits for the last one and for ``num_below`` before it."""
    start = model.num_rows(slot)
    num_new = len(token_ids) - start
    return Extension(slot, token_ids[start:], range(start - 1, start - 1 + num_new), num_new - 1 - num_below)


def outcomes(num_accepted: Tensor, num_drafted: int) -> Tensor:
    """Return the class of each round, [N] int64, by how many of its ``num_drafted`` tokens were accepted, [N]."""
    classes = torch.full_like(num_accepted, UNDECIDED)
    classes[num_accepted == num_drafted] = ALL_ACCEPTED
    classes[num_accepted == 0] = ALL_REJECTED
    return classes
