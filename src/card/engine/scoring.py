"""Log-probabilities of given texts, by forward passes between rounds, a part of a text at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from card.errors import CapacityError, CardError, PromptError, TargetError, in_words, named
from card.machine.threads import CoreSet, pinned
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from card.models.rows.pool import SequencePool
from card.tree.sampling import TokenLogprobs, token_logprobs

Scores = tuple[TokenLogprobs, ...]


class ScoringJob:
    """One text, and a future for its scores."""

    def __init__(self, token_ids: tuple[int, ...], num_top: int) -> None:
        """Ask for the log-probability of each token but the first, and the ``num_top`` likeliest tokens there."""
        self.token_ids, self.num_top = token_ids, num_top
        self.done: Future[Scores] = Future()
        self._is_taken_up = False

    def take_up(self) -> bool:
        """Start the job. Returns: False if the caller has cancelled it; afterwards it cannot be cancelled."""
        self._is_taken_up = self._is_taken_up or self.done.set_running_or_notify_cancel()
        return self._is_taken_up

    def fail(self, error: CardError) -> None:
        """Pass an error to the caller in place of scores."""
        if self.take_up():
            self.done.set_exception(error)


class Scorer:
    """Scores texts one after the other. Between two calls of `step` the engine may run a round."""

    def __init__(
        self, model: LanguageModel, pool: SequencePool, core_set: Callable[[], CoreSet], *, chunk: int
    ) -> None:
        """Share ``model`` and ``pool`` with the engine.

        Args:
            core_set: where to compute now.
            chunk: most tokens of a pass.
        """
        self._model, self._pool, self._core_set, self._chunk = model, pool, core_set, chunk
        self._jobs: deque[ScoringJob] = deque()
        self._slot: int | None = None  # of the first job, once it has begun
        self._scores: list[TokenLogprobs] = []

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return bool(self._jobs)

    def check(self, token_ids: tuple[int, ...]) -> None:
        """Raise PromptError if the text can never be scored: unknown tokens, too long, or too large for the memory."""
        for token_id in token_ids:
            if not 0 <= token_id < self._model.vocab_size:
                raise PromptError(f"token ids must be from 0 to {self._model.vocab_size - 1}, got {token_id}")
        if not 1 <= len(token_ids) <= self._model.max_model_len:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens; it must have at least one, and the context holds "
                f"{self._model.max_model_len}"
            )
        if not self._pool.can_ever_hold(len(token_ids)):
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens, more than {named('kv_cache_memory')} holds; shorten it"
            )

    def add(self, job: ScoringJob) -> None:
        """Queue a text that passed `check`."""
        self._jobs.append(job)

    def step(self, *, is_alone: bool) -> None:
        """Run one pass for the oldest text.

        Args:
            is_alone: nothing else runs, so a text that finds no room now never will.
        """
        job = self._jobs[0]
        if not job.take_up():
            self._jobs.popleft()
            return
        try:
            with pinned(self._core_set()):
                is_over = self._advance(job)
        except CapacityError as error:
            if not is_alone and self._slot is None:
                return  # running requests will finish
            self._end(job)
            job.fail(error)
        except Exception as error:
            self._end(job)
            job.fail(TargetError(f"the target's pass failed for this text: {in_words(error)}"))
        else:
            if is_over:
                scores = tuple(self._scores)
                self._end(job)
                job.done.set_result(scores)

    def fail(self, error: CardError) -> None:
        """Fail all texts."""
        for job in self._jobs:
            job.fail(error)
        self._jobs.clear()

    def _advance(self, job: ScoringJob) -> bool:
        """Run the next part of a text; return whether it was the last one."""
        token_ids = job.token_ids
        if self._slot is None:
            self._slot = self._pool.open((), len(token_ids), text_len=len(token_ids)).slot
        first = self._model.num_rows(self._slot)
        part = token_ids[first : min(first + self._chunk, len(token_ids) - 1)]  # the last token need not be run
        if part:
            parents = [first + i - 1 if first + i else NO_PARENT for i in range(len(part))]
            logits = self._model.forward([Extension(self._slot, part, parents)])[0]
            next_ids = token_ids[first + 1 : first + 1 + len(part)]
            self._scores += token_logprobs(logits, next_ids, job.num_top)
        return first + len(part) >= len(token_ids) - 1

    def _end(self, job: ScoringJob) -> None:
        """Free the slot; the rows stay for a request that begins with this text."""
        self._jobs.popleft()
        self._scores = []
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._pool.close(slot, job.token_ids[: self._model.num_rows(slot)])
