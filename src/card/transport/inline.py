"""A drafter in the target's own thread: the two take turns."""

from __future__ import annotations

from card.drafter import DrafterWorker
from card.messages import DrafterMessage, TargetMessage
from card.transport.link import LinkStatus


class InlineLink:
    """Runs the drafter only inside `draft`."""

    runs_by_itself = False

    def __init__(self, worker: DrafterWorker) -> None:
        self._status = LinkStatus("up")
        self._worker = worker
        self._received: list[DrafterMessage] = []

    def start(self) -> None:
        """Nothing to bring up."""

    def send(self, message: TargetMessage) -> None:
        """Hand the message to the worker at once."""
        self._received += self._worker.receive(message)

    def receive(self) -> list[DrafterMessage]:
        """Return the worker's messages since the last call."""
        received, self._received = self._received, []
        return received

    def wait(self, timeout_s: float) -> None:
        """Return at once: nothing arrives while the target waits."""

    def draft(self, num_passes: int) -> None:
        """Make up to ``num_passes`` drafter passes."""
        for _ in range(num_passes):
            if self._worker.is_idle or self._status.state == "down":
                break
            self._received += self._worker.step()

    def reject(self, reason: str) -> None:
        """Listen no more to a drafter that sends nonsense."""
        self._status = LinkStatus("down", reason)

    @property
    def status(self) -> LinkStatus:
        """Up until rejected."""
        return self._status

    def close(self) -> None:
        """Nothing to end."""
