"""The request loop: drive the target's state machine, feed it what the drafter says, and yield tokens as they come."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator

from card.errors import ProtocolError
from card.messages import Ready, TargetMessage
from card.methods import Method
from card.metrics import RequestStats
from card.target import Progress, TargetRequest, TargetWorker
from card.transport.link import DrafterLink

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests one after another with one method; the drafter, if there is one, is reached over ``link``."""

    def __init__(self, worker: TargetWorker, link: DrafterLink | None, method: Method) -> None:
        self._worker = worker
        self._link = link
        self._method = method
        self._is_unheard = False  # a wait ran out and the drafter has not spoken since: do not wait again

    def run(self, request: TargetRequest) -> Generator[tuple[Progress, RequestStats], None, None]:
        """Yield what each round gives, with the live counters, until the request is finished.

        Closing the generator early drops the request. The drafter may fail at any time: the text is the same.
        """
        request_id, started = request.request_id, time.perf_counter()
        restarts_before = self._link.status.num_restarts if self._link else 0
        self._drain()  # what was said about earlier requests
        self._send(self._worker.add(request))
        stats = self._worker.stats(request_id)
        try:
            is_finished = False
            while not is_finished:
                self._drain()
                if stats.num_new_tokens:
                    self._await_candidates(request, stats)
                elif self._link:
                    self._link.draft(1)  # who takes turns reads the prompt in the prefill, as who runs beside does
                result = self._worker.step([request_id])
                self._send(result.messages)
                stats.wall_s = time.perf_counter() - started
                stats.prefill_s = stats.prefill_s or stats.wall_s
                if self._link:
                    stats.drafter_restarts = self._link.status.num_restarts - restarts_before
                    stats.drafter_state = str(self._link.status)
                is_finished = result.progress[0].finish_reason is not None
                yield result.progress[0], stats
        finally:
            self._send(self._worker.remove(request_id))

    def _await_candidates(self, request: TargetRequest, stats: RequestStats) -> None:
        """Let a drafter that takes turns draft; wait for a short cache as long as the wait policy allows."""
        if self._link is None or not request.uses_drafter:
            return
        started = time.perf_counter()
        self._link.draft(request.draft.num_speculative_tokens)
        self._drain()
        deadline = time.perf_counter() + request.draft.max_wait_s
        while (
            self._link.runs_by_itself
            and not self._is_unheard
            and self._link.status.state == "up"
            and self._worker.is_short_of_candidates(request.request_id)
        ):
            left_s = deadline - time.perf_counter()
            if left_s <= 0:
                self._is_unheard = True
                break
            self._link.wait(left_s)
            self._drain()
        stats.waited_s += time.perf_counter() - started

    def _drain(self) -> None:
        """Give the worker everything that the drafter has said."""
        if self._link is None:
            return
        messages = self._link.receive()
        self._is_unheard = self._is_unheard and not messages
        for message in messages:
            if isinstance(message, Ready):
                self._send(self._worker.reopen())
                continue
            try:
                self._send(self._worker.receive(message))
            except ProtocolError as error:
                self._link.reject(str(error))
                return

    def _send(self, messages: list[TargetMessage]) -> None:
        if self._link is not None:
            for message in messages:
                self._link.send(message)
