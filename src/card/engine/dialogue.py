"""Messages between the engine and its drafter, and what to send again after either missed some."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from card.config import Schedule
from card.drafting.messages import Layer, Ready, TargetMessage
from card.engine.target import TargetWorker
from card.engine.tracing import NoTracing
from card.errors import ProtocolError, in_words
from card.links.link import DrafterLink, LinkStatus

logger = logging.getLogger(__name__)


class Dialogue:
    """The target's side of a link."""

    tracing: NoTracing
    """Records what is sent and received."""

    def __init__(self, worker: TargetWorker, link: DrafterLink) -> None:
        self.link = link
        self.tracing = NoTracing()
        self._worker = worker
        self._is_behind = False  # the drafter has not been told what the last passes committed
        self._beam_width: int | None = None
        self._schedule: Schedule | None = None

    @property
    def takes_turns(self) -> bool:
        """True if the drafter drafts only on request."""
        return not self.link.runs_by_itself

    @property
    def status(self) -> LinkStatus:
        """State of the drafter as users see it."""
        return self.link.worst_status

    def listen(self) -> None:
        """Give the worker all messages from the drafter that have arrived."""
        for message in self.link.receive():
            if isinstance(message, Ready):
                self.tracing.drafter_came()
                self.send(self._worker.reopen())
                continue
            try:
                self.send(self._worker.receive(message))
            except Exception as error:  # no message of a drafter may end a text
                if not isinstance(error, ProtocolError):
                    logger.error("a drafter's message could not be read: %s", in_words(error), exc_info=error)
                self.link.reject(in_words(error))
                return
            if isinstance(message, Layer):
                self.tracing.layer(message, self._worker.find(message.request_id))

    def send(self, messages: Sequence[TargetMessage]) -> None:
        """Send messages to the drafter."""
        for message in messages:
            self.link.send(message)
        self.tracing.sent(messages)

    def tell_round(self, messages: Sequence[TargetMessage], *, is_heard: bool) -> None:
        """Send what a pass committed; if the drafter is not to hear of it now, it catches up later."""
        self._is_behind = not is_heard
        if is_heard:
            self.send(messages)

    def follow(self, schedule: Schedule, beam_width: int | None) -> None:
        """Set the drafter up for this schedule: tune its beams, and let it catch up if it runs by itself."""
        if schedule != self._schedule:
            self._schedule = schedule
            self.link.use(schedule)
            self.listen()  # a new drafter learns of every request before its first turn
        if schedule == "beside":
            self.let_catch_up()
        if beam_width != self._beam_width:
            self._beam_width = beam_width
            self._worker.tune(beam_width)

    def let_catch_up(self) -> None:
        """Send the drafter what it missed, or whole texts if it asks for them."""
        if self._is_behind:
            self._is_behind = False
            self.send(self._worker.catch_up())
            self.listen()
