"""Mine important mismatches: the examples that AutoJudge and rewards of steps learn from.

The target answers a question greedily. At the first mismatch, the draft model's token replaces the target's, and the
target continues greedily to the end. If the answer is the same, the mismatch was unimportant and the new text is kept;
else it was important and the old text is kept. The same is done with the next mismatch, and so on.
Source: Garipov et al. 2025, arXiv:2504.20039, algorithm 1. For steps, the draft model writes on to its step's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from card.backends.transformers.arrays import as_tensor
from card.family.judges.auto import AUTO_WISH
from card.models.protocol import Extension
from card.models.runner import RowRunner

AT_ONCE = 16  # prompts whose texts share a pass
_LOOKAHEAD = 16  # tokens of a text that the draft model reads at once; those after a mismatch are wasted


@dataclass(frozen=True, slots=True)
class Mined:
    """The outcome of a mismatch, and how far its prompt is. A prompt's first one is its answer alone; on the CPU."""

    prompt_idx: int
    answer_ids: tuple[int, ...]  # the present answer of the prompt
    place: int  # tokens of the answer before the next mismatch; all of them: there is none
    is_important: bool | None = None  # True if the answer changed; None: this is the first answer
    features: Tensor | None = None  # [D] float32: the target's last hidden state at the last token of the draft's

    @property
    def is_last(self) -> bool:
        """True if all mismatches of the prompt are tried."""
        return self.place == len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class Mismatches:
    """N mismatches of several prompts; on the CPU."""

    features: Tensor  # [N, D] float32, as in `Mined`
    is_important: Tensor  # [N] bool
    prompt_idx: Tensor  # [N] int64: its prompt

    def __len__(self) -> int:
        return len(self.is_important)

    @classmethod
    def joined(cls, mined: Iterable[Mined]) -> Mismatches:
        """Return the mismatches of all prompts, in the prompts' order."""
        tried = sorted((one for one in mined if one.features is not None), key=lambda one: one.prompt_idx)
        states = [one.features for one in tried if one.features is not None]
        return cls(
            torch.stack(states) if states else torch.zeros((0, 0)),
            torch.tensor([bool(one.is_important) for one in tried], dtype=torch.bool),
            torch.tensor([one.prompt_idx for one in tried], dtype=torch.int64),
        )


@dataclass(slots=True)
class _Text:
    """A text that the target is writing; its last token may have no row."""

    token_ids: list[int]
    slot: int
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
    guesses: dict[int, int] = field(default_factory=dict)  # the draft model's token by place

    def mined(self, is_important: bool | None, features: Tensor | None) -> Mined:
        """Return the last outcome, and how far the prompt is."""
        assert self.text is not None
        answer_ids = tuple(self.text.token_ids[self.num_prompt :])
        return Mined(self.prompt_idx, answer_ids, self.place - self.num_prompt, is_important, features)


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
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        is_over: Callable[[], bool] = lambda: False,
        *,
        earlier: Mapping[int, Mined] = MappingProxyType({}),
    ) -> Iterator[Mined]:
        """Yield the first answer of each prompt, then each mismatch once it is tried; `AT_ONCE` prompts share passes.

        Args:
            prompts: index and token ids of each; 1 to `max_prompt_tokens` of them.
            is_over: called after each pass; mining ends when it returns True.
            earlier: by prompt index, what was yielded of it last in an earlier run, which it goes on from.
        """
        left = (one for one in prompts if one[0] not in earlier or not earlier[one[0]].is_last)
        waiting, running = deque(left), list[_Question]()
        try:
            while (waiting or running) and not is_over():
                while waiting and len(running) < AT_ONCE:
                    idx, prompt = waiting.popleft()
                    running.append(self._begin(idx, prompt, earlier.get(idx)))
                self._write(running)
                for one in [one for one in running if self._is_done(one)]:
                    is_known = one.text is None and one.prompt_idx in earlier
                    outcome = self._label(one)
                    if not self._try_next(one):
                        running.remove(one)
                        self._close(one)
                    if not is_known:
                        yield one.mined(*outcome)
        finally:
            for one in running:
                self._close(one)

    def _begin(self, prompt_idx: int, prompt: Sequence[int], earlier: Mined | None) -> _Question:
        """Open a prompt; an answer of an earlier run is read in one pass."""
        most, place = len(prompt) + self._max_tokens, len(prompt) + (earlier.place if earlier else 0)
        written = _Text([*prompt, *(earlier.answer_ids if earlier else ())], self._target.open(most))
        return _Question(prompt_idx, len(prompt), written, self._draft.open(most), place)

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
        answer_ids = token_ids[question.num_prompt :]
        return len(answer_ids) > 0 and (answer_ids[-1] in self._end_ids or len(answer_ids) >= self._max_tokens)

    def _label(self, one: _Question) -> tuple[bool | None, Tensor | None]:
        """Process a finished text; return its label and state if it continued a mismatch, not of a first answer."""
        written = one.written
        answer = self._answer_of(one.prompt_idx, written.token_ids[one.num_prompt :])
        if one.text is None:
            one.text, one.answer = written, answer
            return None, None
        assert written.state is not None
        is_important = self._is_important(one.answer, answer)
        if is_important:
            self._target.close(written.slot)
            one.written = one.text
        else:
            self._target.close(one.text.slot)
            one.text = written
            one.guesses.clear()
            self._keep_draft(one)
        one.place += 1  # what follows of a step is the draft model's choice, too
        return is_important, written.state

    def _try_next(self, one: _Question) -> bool:
        """Put the draft's token in at the next mismatch; return whether there is one."""
        assert one.text is not None
        token_ids = one.text.token_ids
        while one.place < len(token_ids) and self._guess(one) == token_ids[one.place]:
            one.place += 1
        if one.place == len(token_ids):
            return False
        slot = self._target.open(one.num_prompt + self._max_tokens)
        one.written = _Text([*token_ids[: one.place], *self._put_in(one)], slot)
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
        if one.place not in one.guesses:
            assert one.text is not None
            token_ids, held = one.text.token_ids[: one.place + _LOOKAHEAD], self._draft.num_rows(one.draft_slot)
            (logits,) = self._draft.forward([Extension.of_text(one.draft_slot, token_ids, held, one.place - 1)])
            one.guesses.update(enumerate(logits[:, : self._target.vocab_size].argmax(-1).tolist(), one.place))
        return one.guesses[one.place]


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
        if not one.answer and one.text is not None:
            one.place = len(one.text.token_ids)  # nothing can be lost
        return super()._try_next(one)

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
