"""The target's pass of a round. If it fails, the requests that cause the failure are found and ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from card.engine.request import StepResult
from card.engine.sequence import Work
from card.engine.target import TargetWorker
from card.errors import CapacityError, TargetError, WorkerError, in_words

logger = logging.getLogger(__name__)
_MOST_FAILED_ROUNDS = 3  # failed rounds in a row, for all requests, before the target is tested with one token


class TargetPasses:
    """Runs passes of a worker; a failing pass ends only the requests that cause the failure."""

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker
        self._num_failed_rounds = 0
        self._death: str | None = None  # why the target is broken; None: it is not

    def check_alive(self) -> None:
        """Raise WorkerError if the target is broken."""
        if self._death is not None:
            raise WorkerError(f"the engine is down: {self._death}; restart it")

    def run(self, work: Sequence[Work], *, is_heard: bool = True) -> tuple[StepResult, dict[int, TargetError]]:
        """Run a pass; ``is_heard`` as in `TargetWorker.step`.

        Returns: the result, and the error of each request that the pass failed for.
        """
        if not work:
            return StepResult(), {}
        errors: dict[int, TargetError] = {}
        try:
            result = self._worker.step(work, is_heard=is_heard)
        except Exception as error:
            logger.warning("a target pass for %d requests failed: %s", len(work), error)
            result = self._run_halves(work, error, errors, is_heard=is_heard)
        self._num_failed_rounds = 0 if len(errors) < len(work) else self._num_failed_rounds + 1
        if self._num_failed_rounds >= _MOST_FAILED_ROUNDS:
            self._num_failed_rounds = 0
            self._death = self._why_broken()
        return result, errors

    def _why_broken(self) -> str | None:
        """Return why not even a single token can be run; None if it can: then the requests caused the failure."""
        try:
            self._worker.run_one_token()
        except CapacityError:  # the failed requests still hold all the memory
            return None
        except Exception as error:
            logger.exception("the target is broken")
            return f"{_MOST_FAILED_ROUNDS} rounds in a row failed, and a single token fails with {in_words(error)}"
        return None

    def _run_halves(
        self, work: Sequence[Work], error: Exception, errors: dict[int, TargetError], *, is_heard: bool
    ) -> StepResult:
        """Run each half on its own, down to single requests; a request that fails even without candidates is ended."""
        if len(work) == 1 and not work[0].offer and not work[0].drafts:
            errors[work[0].request_id] = TargetError(f"the target's pass failed for this request: {in_words(error)}")
            return StepResult()
        middle = len(work) // 2
        total = StepResult()
        for half in (work[:middle], work[middle:]) if middle else ([Work(work[0].sequence)],):
            try:
                total.add(self._worker.step(half, is_heard=is_heard))
            except Exception as further:
                total.add(self._run_halves(half, further, errors, is_heard=is_heard))
        return total
