"""A drafter in the target's own thread: the two take turns."""

from __future__ import annotations

import logging
from collections.abc import Callable

from card.errors import CardError
from card.transport.link import DrafterLink, LinkStatus
from card.tree.messages import DrafterMessage, TargetMessage
from card.workers.drafter import DrafterWorker

logger = logging.getLogger(__name__)


class InlineLink(DrafterLink):
    """Runs the drafter only inside `draft`. A worker that raises is down for good; the target goes on alone."""

    runs_by_itself = False

    def __init__(self, worker: DrafterWorker) -> None:
        super().__init__()
        self._worker = worker
        self._received: list[DrafterMessage] = []

    def send(self, message: TargetMessage) -> None:
        """Hand the message to the worker at once."""
        self._run(lambda: self._worker.receive(message))

    def receive(self) -> list[DrafterMessage]:
        """Return the worker's messages since the last call."""
        received, self._received = self._received, []
        return received

    def draft(self, num_passes: int) -> None:
        """Make up to ``num_passes`` drafter passes."""
        for _ in range(num_passes):
            if self._status.state == "down" or self._worker.is_idle:
                break
            self._run(self._worker.step)

    def _run(self, act: Callable[[], list[DrafterMessage]]) -> None:
        if self._status.state == "down":
            return
        try:
            self._received += act()
        except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
            logger.warning("drafter ends: %s", error)
            self._status = LinkStatus("down", f"{type(error).__name__}: {error}")
