"""Mine important mismatches: the examples that AutoJudge and rewards of steps learn from.

The target answers a question greedily. At the first mismatch, the draft model's token replaces the target's, and the
target continues greedily to the end. If the answer is the same, the mismatch was unimportant and the new text is kept;
else it was important and the old text is kept. The same is done with the next mismatch, and so on.
Source: Garipov et al. 2025, arXiv:2504.20039, algorithm 1. For steps, the draft model writes on to its step's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from card.family.judges.auto import AUTO_WISH
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.theirs.transformers.arrays import as_tensor

AT_ONCE = 16  # prompts whose texts share a pass
_LOOKAHEAD = 16  # tokens of a text that the draft model reads at once; those after a mismatch are wasted


@dataclass(frozen=True, slots=True)
class Mined:
    """The N mismatches of one prompt and their outcomes; on the CPU."""

    prompt_idx: int
    features: Tensor  # [N, D] float32: the target's last hidden state at the last token of the draft's
    is_important: tuple[bool, ...]  # [N] True if the answer changed


@dataclass(frozen=True, slots=True)
class Mismatches:
    """N mismatches of several prompts; on the CPU."""

    features: Tensor  # [N, D] float32, as in `Mined`
    is_important: Tensor  # [N] bool
    prompt_idx: Tensor  # [N] int64: its prompt

    def __len__(self) -> int:
        return len(self.is_important)

    @classmethod
    def joined(cls, mined: Sequence[Mined]) -> Mismatches:
        """Return the mismatches of all prompts, in their order."""
        mined = sorted((one for one in mined if one.is_important), key=lambda one: one.prompt_idx)
        return cls(
            torch.cat([one.features for one in mined]) if mined else torch.zeros((0, 0)),
            torch.tensor([label for one in mined for label in one.is_important], dtype=torch.bool),
            torch.tensor([one.prompt_idx for one in mined for _ in one.is_important], dtype=torch.int64),
        )


@dataclass(slots=True)
class _Text:
    """A text that the target is writing; its last token may have no row."""

    token_ids: list[int]
    slot: int
    num_put_in: int = 0  # newest tokens that the draft model wrote
    state: Tensor | None = None  # [D] at the last token of the text as it began


@dataclass(slots=True)
class _Question:
    """A prompt with its present answer, and the text in progress."""

    prompt_idx: int
    num_prompt: int
    written: _Text  # at first the answer itself, then the continuation of a mismatch
    draft_slot: int  # in the draft model, which reads the answer
    place: int  # all mismatches before it are labelled
    text: _Text | None = None  # the present answer, once it is written
    answer: Hashable = None
    guesses: list[int] = field(default_factory=list)  # the draft model's token at places from the prompt's end on
    states: list[Tensor] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)

    def mined(self) -> Mined:
        """Return the mismatches found so far."""
        features = torch.stack(self.states) if self.states else torch.zeros((0, 0))
        return Mined(self.prompt_idx, features, tuple(self.labels))


class Miner:
    """Lets a pair answer prompts, and labels its mismatches as important or not."""

    def __init__(
        self,
        target: RowRunner,
        draft: RowRunner,
        *,
        answer_of: Callable[[int, Sequence[int]], Hashable],
        max_tokens: int,
        end_ids: frozenset[int],
    ) -> None:
        """Use both models; the target keeps its last hidden states from now on.

        Args:
            answer_of: returns the result of an answer from its prompt's index and its tokens; answers with equal
                results are the same.
            max_tokens: new tokens after which a text is cut off.
        """
        target.features.wish([AUTO_WISH])
        self._target, self._draft = target, draft
        self._answer_of, self._max_tokens, self._end_ids = answer_of, max_tokens, end_ids

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt that leaves room for an answer."""
        return min(self._target.max_model_len, self._draft.max_model_len) - self._max_tokens

    def mine(
        self, prompts: Sequence[tuple[int, Sequence[int]]], is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Mined]:
        """Yield the mismatches of each prompt when all of them are tried. At most `AT_ONCE` prompts share passes.

        Args:
            prompts: index and token ids of each; 1 to `max_prompt_tokens` of them.
            is_over: called after each pass. When it returns True, unfinished prompts are yielded with the mismatches
                tried so far; prompts without a first answer are left out.
        """
        waiting, running = deque(prompts), list[_Question]()
        try:
            while (waiting or running) and not is_over():
                while waiting and len(running) < AT_ONCE:
                    running.append(self._begin(*waiting.popleft()))
                self._write(running)
                for one in [one for one in running if self._is_done(one)]:
                    self._label(one)
                    if not self._try_next(one):
                        running.remove(one)
                        self._close(one)
                        yield one.mined()
            for one in running:
                if one.text is not None:
                    yield one.mined()
        finally:
            for one in running:
                self._close(one)

    def _begin(self, prompt_idx: int, prompt: Sequence[int]) -> _Question:
        most = len(prompt) + self._max_tokens
        written = _Text(list(prompt), self._target.open(most))
        return _Question(prompt_idx, len(prompt), written, self._draft.open(most), len(prompt))

    def _close(self, question: _Question) -> None:
        texts = (question.text, question.written)
        for slot in {text.slot for text in texts if text is not None}:
            self._target.close(slot)
        self._draft.close(question.draft_slot)

    def _write(self, questions: Sequence[_Question]) -> None:
        """Let the target write a token of each text; each keeps the state at the last token that it began with."""
        texts = [one.written for one in questions]
        extensions = [Extension.of_text(one.slot, one.token_ids, self._target.num_rows(one.slot)) for one in texts]
        for idx, logits in enumerate(self._target.forward(extensions)):
            text = questions[idx].written
            if text.state is None:
                text.state = as_tensor(np.array(self._target.features.of(idx, AUTO_WISH)[0]))
            if not self._is_done(questions[idx]):
                text.token_ids.append(int(logits[0].argmax()))

    def _is_done(self, question: _Question) -> bool:
        token_ids = question.written.token_ids
        num_new = len(token_ids) - question.num_prompt
        return num_new > 0 and (token_ids[-1] in self._end_ids or num_new >= self._max_tokens)

    def _label(self, one: _Question) -> None:
        """Process a finished text: the first answer, or the outcome of a mismatch."""
        written = one.written
        answer = self._answer_of(one.prompt_idx, written.token_ids[one.num_prompt :])
        if one.text is None:
            one.text, one.answer = written, answer
            return
        assert written.state is not None
        is_important = self._is_important(one.answer, answer)
        one.states.append(written.state)
        one.labels.append(is_important)
        if is_important:
            self._target.close(written.slot)
            one.written = one.text
            one.place += 1
        else:
            self._target.close(one.text.slot)
            one.text = written
            end = one.place + written.num_put_in
            one.guesses[one.place - one.num_prompt :] = written.token_ids[one.place : end]
            self._keep_draft(one)
            one.place = end

    def _try_next(self, one: _Question) -> bool:
        """Put the draft's token in at the next mismatch; return whether there is one."""
        assert one.text is not None
        token_ids = one.text.token_ids
        while one.place < len(token_ids) and self._guess(one) == token_ids[one.place]:
            one.place += 1
        if one.place == len(token_ids):
            return False
        slot, put_in = self._target.open(one.num_prompt + self._max_tokens), self._put_in(one)
        one.written = _Text([*token_ids[: one.place], *put_in], slot, len(put_in))
        self._target.copy_rows(one.text.slot, slot, one.place)
        return True

    def _is_important(self, before: Hashable, after: Hashable) -> bool:
        """Return whether the draft's tokens, which turned one result into the other, were important."""
        return after != before

    def _put_in(self, one: _Question) -> list[int]:
        """Return the tokens of the draft model that replace the target's at a mismatch."""
        return [self._guess(one)]

    def _keep_draft(self, one: _Question) -> None:
        """Let the draft model forget what it has read from the question's place on."""
        self._draft.keep(one.draft_slot, min(one.place, self._draft.num_rows(one.draft_slot)))

    def _guess(self, one: _Question) -> int:
        """Return the token that the draft model would write at the question's place."""
        if one.place - one.num_prompt == len(one.guesses):
            assert one.text is not None
            token_ids, held = one.text.token_ids[: one.place + _LOOKAHEAD], self._draft.num_rows(one.draft_slot)
            (logits,) = self._draft.forward([Extension.of_text(one.draft_slot, token_ids, held, one.place - 1)])
            one.guesses += logits[:, : self._target.vocab_size].argmax(-1).tolist()
        return one.guesses[one.place - one.num_prompt]


class StepMiner(Miner):
    """Tries the draft's steps instead of its tokens: important is one without which the answer would be right.

    ``answer_of`` returns whether an answer is right. Where the target's first answer is not, nothing can be lost, and
    no step is tried. Source: Arbitrage, arXiv:2512.05033: a step of the draft model is compared with the target's own.
    """

    def __init__(self, target: RowRunner, draft: RowRunner, *, step_ends: frozenset[int], **options: Any) -> None:
        """Use both models; ``step_ends`` are as of `card.family.judges.steps`, ``options`` those of `Miner`."""
        super().__init__(target, draft, **options)
        self._step_ends = step_ends

    def _is_important(self, before: Hashable, after: Hashable) -> bool:
        return not after

    def _try_next(self, one: _Question) -> bool:
        return bool(one.answer) and super()._try_next(one)

    def _put_in(self, one: _Question) -> list[int]:
        assert one.text is not None
        token_ids = [*one.text.token_ids[: one.place], self._guess(one)]
        self._keep_draft(one)
        while token_ids[-1] not in self._step_ends and len(token_ids) < one.num_prompt + self._max_tokens:
            held = self._draft.num_rows(one.draft_slot)
            (logits,) = self._draft.forward([Extension.of_text(one.draft_slot, token_ids, held)])
            token_ids.append(int(logits[0, : self._target.vocab_size].argmax()))
        self._keep_draft(one)
        return token_ids[one.place :]
