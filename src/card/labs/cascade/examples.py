"""Beginnings of a prompt (examples or an instruction), scored by a model's loss on problems with known answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from card.errors import SettingsError
from card.models.protocol import Extension, LanguageModel, Recurrent
from card.text.prompts import encode_chat, encode_prompt
from card.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SolvedProblem:
    """A question with its answer."""

    question: str
    answer: str


Examples = tuple[SolvedProblem, ...]
Beginning = Examples | str  # ordered solved problems, or an instruction before each question


def draw_example_sets(pool: Sequence[SolvedProblem], *, shots: int, count: int, seed: int) -> list[Examples]:
    """Return ``count`` different ordered sets of ``shots`` problems, or all there are if those are fewer.

    Raises: SettingsError if the pool is smaller than a set.
    """
    if not 1 <= shots <= len(pool):
        raise SettingsError(
            f"{shots} examples cannot be taken from {len(pool)} problems; take fewer, or give more problems"
        )
    rng, orders = random.Random(seed), dict[tuple[int, ...], None]()
    wanted = min(count, math.perm(len(pool), shots))
    while len(orders) < wanted:
        orders[tuple(rng.sample(range(len(pool)), shots))] = None
    return [tuple(pool[idx] for idx in places) for places in orders]


class PromptLoss:
    """Scores beginnings of a prompt: the mean loss of a model on the answers of problems that follow them."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, problems: Sequence[SolvedProblem]) -> None:
        """Score on ``problems``, through the tokenizer's chat template if it has one. Raises: SettingsError."""
        if not problems:
            raise SettingsError("there are no problems to judge by; give one or more")
        self._model, self._tokenizer, self._problems = model, tokenizer, problems
        self._answers = [tokenizer.encode(one.answer, add_special_tokens=False) for one in problems]
        self.num_passes = 0  # of the model, so far
        self.num_tokens = 0  # in these passes

    def __call__(self, beginning: Beginning) -> float:
        """Return the loss, nats per token of the answers; inf for a beginning too long for the model's context."""
        prompts = [self._prompt(beginning, one.question) for one in self._problems]
        longest = max(len(ids) + len(answer) for ids, answer in zip(prompts, self._answers, strict=True))
        if longest > self._model.max_model_len:
            return math.inf
        num_shared = 0 if isinstance(self._model, Recurrent) else _num_shared(prompts)  # a state cannot be cut
        loss = sum(self._losses(prompts, num_shared, longest))
        return loss / sum(map(len, self._answers))

    def _losses(self, prompts: Sequence[Sequence[int]], num_shared: int, longest: int) -> list[float]:
        """Return the summed loss of each answer; the common beginning of all prompts is run once."""
        losses, slot = [], self._model.open(longest)
        try:
            if num_shared:
                self._run(slot, 0, prompts[0][:num_shared], num_shared - 1)
            for prompt, answer in zip(prompts, self._answers, strict=True):
                text = [*prompt[num_shared:], *answer[:-1]]  # no answer token follows the last one
                logits = self._run(slot, num_shared, text, len(text) - len(answer))
                logprobs = torch.log_softmax(logits.double(), dim=-1)
                asked = torch.tensor(answer, device=logprobs.device)
                losses.append(-float(logprobs.gather(-1, asked[:, None]).sum()))
                if num_shared:
                    self._model.keep(slot, num_shared)
                else:
                    self._model.close(slot)
                    slot = self._model.open(longest)
        finally:
            self._model.close(slot)
        return losses

    def _run(self, slot: int, first: int, token_ids: Sequence[int], first_logits_idx: int) -> torch.Tensor:
        self.num_passes += 1
        self.num_tokens += len(token_ids)
        parents = range(first - 1, first - 1 + len(token_ids))
        (logits,) = self._model.forward([Extension(slot, token_ids, parents, first_logits_idx)])
        return torch.from_numpy(np.asarray(logits))

    def _prompt(self, beginning: Beginning, question: str) -> list[int]:
        if isinstance(beginning, str):
            examples: Examples = ()
            question = f"{beginning}\n\n{question}"
        else:
            examples = beginning
        if not self._tokenizer.chat_template:
            solved = "".join(f"{one.question}\n{one.answer}\n\n" for one in examples)
            return encode_prompt(self._tokenizer, f"{solved}{question}\n")
        messages = [
            {"role": role, "content": text}
            for one in examples
            for role, text in (("user", one.question), ("assistant", one.answer))
        ]
        return encode_chat(self._tokenizer, [*messages, {"role": "user", "content": question}])


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common beginning, without the last token of a prompt, which predicts the answer."""
    shortest = min(map(len, prompts)) - 1
    for idx in range(shortest):
        if any(ids[idx] != prompts[0][idx] for ids in prompts):
            return idx
    return shortest
