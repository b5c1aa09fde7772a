"""Data for H-RAD: rounds of greedy speculation, each with the target's features before it and its outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from card.backends.transformers.arrays import as_tensor
from card.config import SamplingRule
from card.family.learning.target_texts import WrittenText, written_texts
from card.family.specbranch.network import ALL_ACCEPTED, ALL_REJECTED, UNDECIDED, last_states
from card.models.candidate_scorer import CandidateScorer
from card.models.protocol import Extension
from card.models.runner import RowRunner


@dataclass(frozen=True, slots=True)
class Rounds:
    """N rounds: inputs before each, and its outcome; on the CPU."""

    inputs: Tensor  # [N, (num_layers + 1) * D] in the target's dtype: features and embedding as of `HRad`
    num_accepted: Tensor  # [N] int64: from 0 to K
    confidences: Tensor  # [N, K] float32: the drafter's probability of each drafted token; tokens after the first
    # rejected one have no outcome
    prompt_idx: Tensor  # [N] int64: its prompt

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


_Round = tuple[Tensor, int, list[float], int]
"""One round, in the order of the fields of `Rounds`."""


class RoundCollector:
    """Lets the target answer prompts greedily, several at a time, and computes how each round would have ended.

    A drafted token is accepted if it is the target's own. So the target's text, and the draft model's predictions along
    it, determine where rounds begin and how they end.
    """

    def __init__(
        self,
        target: RowRunner,
        draft: RowRunner,
        *,
        num_layers: int,
        num_speculative_tokens: int,
        max_tokens: int,
        end_ids: frozenset[int],
    ) -> None:
        """Use both models.

        Args:
            num_layers: last layers of the target whose hidden states are inputs.
            max_tokens: new tokens after which a text is cut off.
            end_ids: tokens that end a text.
        Raises: ModelError if the target has fewer layers.
        """
        self._wish = last_states(target, num_layers, "logits")
        self._target, self._draft = target, draft
        self._most_tokens = min(target.max_model_len, draft.max_model_len) - 1
        self._num_drafted, self._max_tokens, self._end_ids = num_speculative_tokens, max_tokens, end_ids
        greedy = SamplingRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        self._scorer = CandidateScorer(greedy, draft.vocab_size, coupled=False)

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that leaves room for a round."""
        return self._most_tokens - self._num_drafted

    def collect(self, prompts: Sequence[Sequence[int]], on_answer: Callable[[], None] = lambda: None) -> Rounds:
        """Answer all prompts and return the rounds with a known outcome.

        A round whose text ends within the accepted tokens is left out: the outcome of the other tokens is unknown.

        Args:
            prompts: token ids, 1 to `max_prompt_tokens` each.
            on_answer: called after each answer.
        """
        found: list[_Round] = []
        for text in written_texts(
            self._target,
            prompts,
            self._wish,
            temperature=0.0,
            seed=0,
            max_tokens=self._max_tokens + self._num_drafted - 1,
            most_tokens=self._most_tokens,
            end_ids=self._end_ids,
        ):
            found += self._rounds(text)
            on_answer()
        columns = list(zip(*found, strict=True)) or [()] * 4
        inputs, num_accepted, confidences, prompt_idx = columns
        return Rounds(
            torch.stack(inputs) if found else torch.zeros((0, 0)),
            torch.tensor(num_accepted, dtype=torch.int64),
            torch.tensor(confidences, dtype=torch.float32).view(-1, self._num_drafted),
            torch.tensor(prompt_idx, dtype=torch.int64),
        )

    def _rounds(self, text: WrittenText) -> Iterator[_Round]:
        """Yield the rounds of a whole text; the draft model reads it once."""
        token_ids, num_before = text.token_ids, len(text.prompt) + 1  # a prompt's pass gives the first token
        if len(token_ids) == num_before:
            return
        slot = self._draft.open(len(token_ids))
        (logits,) = self._draft.forward([Extension.of_text(slot, token_ids, first_logits=num_before - 1)])
        self._draft.close(slot)
        best, logprobs = self._scorer.top(logits, [0] * len(logits), 1)
        guesses, probs = [one for (one,) in best], [math.exp(one) for (one,) in logprobs]
        length, longest = num_before, min(len(text.prompt) + self._max_tokens - 1, self.max_prompt_tokens)
        while length <= longest and token_ids[length - 1] not in self._end_ids:
            first = length - num_before
            pairs = zip(guesses[first:], token_ids[length : length + self._num_drafted], strict=False)
            accepted = [guess for guess, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            if not self._end_ids.isdisjoint(accepted):
                return
            confidences = (probs[first:] + [0.0] * self._num_drafted)[: self._num_drafted]
            embedding = as_tensor(self._target.embeddings([token_ids[length - 1]])[0])
            yield torch.cat((text.features[first][0], embedding)), len(accepted), confidences, text.idx
            length += len(accepted) + 1


def outcomes(num_accepted: Tensor, num_drafted: int) -> Tensor:
    """Return the class of each round, [N] int64, from the accepted number [N] of its ``num_drafted`` tokens."""
    classes = torch.full_like(num_accepted, UNDECIDED)
    classes[num_accepted == num_drafted] = ALL_ACCEPTED
    classes[num_accepted == 0] = ALL_REJECTED
    return classes
