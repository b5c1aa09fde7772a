"""Mismatches that matter, found by going on from them: the examples that AutoJudge learns from.

The target answers a question greedily. At the first token that the draft model would have written otherwise, its token
is put in, and the target goes on greedily to the end. If the answer is the same, the mismatch was unimportant and the
new text is kept; else it was important, and the old text stays. So on to the next mismatch.
Source: Garipov et al. 2025, arXiv:2504.20039, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from card.judges.auto import AUTO_WISH
from card.models.protocol import Extension
from card.models.torch_runner import TorchRunner

BATCH = 32  # questions at once


@dataclass(frozen=True, slots=True)
class Mismatches:
    """N mismatches and what became of them; on the CPU."""

    features: Tensor  # [N, D] float32: the target's last hidden state at the draft's token
    is_important: Tensor  # [N] bool: the answer became another one
    prompt_idx: Tensor  # [N] int64: which prompt it came from

    def __len__(self) -> int:
        return len(self.is_important)


@dataclass(slots=True)
class _Text:
    """A text as the target writes it; its last token may have no row."""

    token_ids: list[int]
    slot: int
    state: Tensor | None = None  # [D] at the first token that it was given after its rows


@dataclass(slots=True)
class _Question:
    """A prompt with its present answer."""

    prompt_idx: int
    num_prompt: int
    text: _Text
    answer: Hashable
    place: int  # mismatches before it are labelled
    guesses: list[int] = field(default_factory=list)  # the draft model's token at each place from the prompt's end


class Miner:
    """Lets a pair answer prompts, and finds out which mismatches of it matter."""

    def __init__(
        self,
        target: TorchRunner,
        draft: TorchRunner,
        *,
        answer_of: Callable[[Sequence[int]], Hashable],
        max_tokens: int,
        end_ids: frozenset[int],
    ) -> None:
        """Take both models; the target keeps its last hidden states from now on.

        Args:
            answer_of: what is asked of an answer, from its tokens; two answers that give equal values are the same.
            max_tokens: new tokens after which a text is broken off.
        """
        target.features.wish([AUTO_WISH])
        self._target, self._draft = target, draft
        self._answer_of, self._max_tokens, self._end_ids = answer_of, max_tokens, end_ids
        self._found: list[tuple[Tensor, bool, int]] = []

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that leaves room for an answer."""
        return min(self._target.max_model_len, self._draft.max_model_len) - self._max_tokens

    def mine(self, prompts: Sequence[Sequence[int]], on_answer: Callable[[], None] = lambda: None) -> Mismatches:
        """Return the mismatches of all prompts.

        Args:
            prompts: token ids, 1 to `max_prompt_tokens` each.
            on_answer: called when a prompt has no more mismatches.
        """
        self._found = []
        for first in range(0, len(prompts), BATCH):
            self._mine_batch(list(enumerate(prompts))[first : first + BATCH], on_answer)
        features = [state for state, _, _ in self._found]
        return Mismatches(
            torch.stack(features) if features else torch.zeros((0, 0)),
            torch.tensor([is_important for _, is_important, _ in self._found], dtype=torch.bool),
            torch.tensor([prompt_idx for _, _, prompt_idx in self._found], dtype=torch.int64),
        )

    def _mine_batch(self, prompts: Sequence[tuple[int, Sequence[int]]], on_answer: Callable[[], None]) -> None:
        most = {idx: len(prompt) + self._max_tokens for idx, prompt in prompts}
        texts = [_Text(list(prompt), self._target.open(most[idx])) for idx, prompt in prompts]
        self._go_on(texts, [len(prompt) for _, prompt in prompts])
        running = []
        for (idx, prompt), text in zip(prompts, texts, strict=True):
            answer = self._answer_of(text.token_ids[len(prompt) :])
            running.append(_Question(idx, len(prompt), text, answer, len(prompt), self._guesses(text, len(prompt))))
        while running:
            for question in [one for one in running if not self._has_mismatch(one)]:
                running.remove(question)
                self._target.close(question.text.slot)
                on_answer()
            self._try(running)

    def _has_mismatch(self, question: _Question) -> bool:
        """Move to the next place where the draft model would have written another token, if there is one."""
        token_ids, first = question.text.token_ids, question.num_prompt
        while question.place < len(token_ids) and question.guesses[question.place - first] == token_ids[question.place]:
            question.place += 1
        return question.place < len(token_ids)

    def _try(self, questions: Sequence[_Question]) -> None:
        """Put the draft's token in at the place of each question, go on from it, and keep the better text."""
        trials = []
        for one in questions:
            guess = one.guesses[one.place - one.num_prompt]
            slot = self._target.open(one.num_prompt + self._max_tokens)
            self._target.copy_rows(one.text.slot, slot, one.place)
            trials.append(_Text([*one.text.token_ids[: one.place], guess], slot))
        self._go_on(trials, [one.num_prompt for one in questions])
        for one, trial in zip(questions, trials, strict=True):
            assert trial.state is not None
            is_important = self._answer_of(trial.token_ids[one.num_prompt :]) != one.answer
            self._found.append((trial.state, is_important, one.prompt_idx))
            one.place += 1
            kept, dropped = (one.text, trial) if is_important else (trial, one.text)
            self._target.close(dropped.slot)
            if kept is not one.text:
                one.text, one.guesses = kept, self._guesses(kept, one.num_prompt)

    def _go_on(self, texts: Sequence[_Text], num_prompts: Sequence[int]) -> None:
        """Let the target write each text to its end; each gets the state at the first token that had no row."""
        running = list(zip(texts, num_prompts, strict=True))
        while running:
            extensions = []
            for text, _ in running:
                start, length = self._target.num_rows(text.slot), len(text.token_ids)
                extensions.append(
                    Extension(text.slot, text.token_ids[start:], range(start - 1, length - 1), length - start - 1)
                )
            for idx, logits in enumerate(self._target.forward(extensions)):
                text = running[idx][0]
                if text.state is None:
                    text.state = self._target.features.of(idx, AUTO_WISH)[0].float().cpu().clone()
                if not self._is_done(*running[idx]):
                    text.token_ids.append(int(logits[0].argmax()))
            running = [(text, num_prompt) for text, num_prompt in running if not self._is_done(text, num_prompt)]

    def _is_done(self, text: _Text, num_prompt: int) -> bool:
        num_new = len(text.token_ids) - num_prompt
        return num_new > 0 and (text.token_ids[-1] in self._end_ids or num_new >= self._max_tokens)

    def _guesses(self, text: _Text, num_prompt: int) -> list[int]:
        """Return what the draft model would write in the place of each token of an answer."""
        token_ids = text.token_ids[:-1]
        slot = self._draft.open(len(token_ids))
        rows = Extension(slot, token_ids, range(-1, len(token_ids) - 1), num_prompt - 1)
        (logits,) = self._draft.forward([rows])
        self._draft.close(slot)
        return [int(token_id) for token_id in logits[:, : self._target.vocab_size].argmax(-1).tolist()]
