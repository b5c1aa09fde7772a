"""A link in the background never makes a step wait, whatever the link behind it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from card.drafting.drafter_pass import NO_END, TurnEnd
from card.drafting.messages import Close, DrafterMessage, Pong, TargetMessage
from card.errors import WorkerError
from card.links.background import BackgroundLink
from card.links.link import DrafterLink, LinkStatus
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(240)


class Recording(DrafterLink):
    """A link that records what it is asked, and may hang or fail."""

    def __init__(self) -> None:
        self.sent: list[TargetMessage] = []
        self.rejected: list[str] = []
        self.is_closed = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False
        self._status = LinkStatus("up")

    def start(self) -> None:
        raise WorkerError("drafter could not be started: no such model")

    def send(self, message: TargetMessage) -> None:
        self.sent.append(message)

    def receive(self) -> list[DrafterMessage]:
        self.may_go_on.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("secret")
        return [Pong(len(self.sent))] if self.sent else []

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("nobody may wait")

    def draft(self, num_passes: int, end: TurnEnd = NO_END) -> list[tuple[int, float]]:
        raise AssertionError("it drafts by itself")

    def reject(self, reason: str) -> None:
        self.rejected.append(reason)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def link() -> Iterator[Recording]:
    link = Recording()
    yield link
    link.may_go_on.set()


def test_messages_go_out_and_come_in(link: Recording):
    background = BackgroundLink(link)
    background.begin()
    background.send(Close(1))
    background.send(Close(2))
    background.reject("nonsense")
    until(lambda: link.sent == [Close(1), Close(2)] and link.rejected == ["nonsense"])
    until(lambda: Pong(2) in background.receive())
    assert background.status.state == "up"
    background.close()
    background.close()
    until(lambda: link.is_closed)


def test_a_link_that_hangs_makes_no_step_wait(link: Recording):
    background = BackgroundLink(link)
    link.may_go_on.clear()
    background.begin()
    began = time.monotonic()
    for _ in range(2000):
        for _ in range(10):
            background.send(Close(1))
        background.receive()
        background.reject("nonsense")
    assert time.monotonic() - began < PATIENCE_S / 2  # a single wait would last as long as the link hangs
    assert len(background._out) <= 8192
    link.may_go_on.set()
    background.close()


def test_a_link_that_fails_is_down_and_its_message_is_not_logged(link: Recording, caplog: pytest.LogCaptureFixture):
    link.fails = True
    background = BackgroundLink(link)
    background.begin()
    until(lambda: background.status.state == "down" and link.is_closed)
    background.send(Close(1))
    assert background.receive() == []
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text
    background.close()


def test_a_drafter_that_is_waited_for_and_does_not_come_up_is_told(link: Recording):
    with pytest.raises(WorkerError, match="no such model"):
        BackgroundLink(link).start()
