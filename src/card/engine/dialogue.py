"""Messages between the engine and its drafter, so that neither misses anything."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from card.config import Schedule
from card.engine.target import TargetWorker
from card.engine.tracing import NoTracing
from card.errors import ProtocolError, in_words
from card.links.link import DrafterLink, LinkStatus
from card.protocol.messages import Layer, Ready, TargetMessage

logger = logging.getLogger(__name__)


class Dialogue:
    """The target's side of a link."""

    tracing: NoTracing
    """Is told what is said."""

    def __init__(self, worker: TargetWorker, link: DrafterLink) -> None:
        self.link = link
        self.tracing = NoTracing()
        self._worker = worker
        self._is_behind = False  # the drafter was not told of what the last passes committed
        self._beam_width: int | None = None
        self._schedule: Schedule | None = None

    @property
    def takes_turns(self) -> bool:
        """True if the drafter drafts only when it is told to."""
        return not self.link.runs_by_itself

    @property
    def status(self) -> LinkStatus:
        """State of the drafter as users are told it."""
        return self.link.worst_status

    def listen(self) -> None:
        """Give the worker everything that the drafter has said."""
        for message in self.link.receive():
            if isinstance(message, Ready):
                self.tracing.drafter_came()
                self.send(self._worker.reopen())
                continue
            try:
                self.send(self._worker.receive(message))
            except Exception as error:  # whatever it has said, it costs no text
                if not isinstance(error, ProtocolError):
                    logger.error("a drafter's message could not be taken: %s", in_words(error), exc_info=error)
                self.link.reject(in_words(error))
                return
            if isinstance(message, Layer):
                self.tracing.layer(message, self._worker.find(message.request_id))

    def send(self, messages: Sequence[TargetMessage]) -> None:
        """Hand messages over."""
        for message in messages:
            self.link.send(message)
        self.tracing.sent(messages)

    def tell_round(self, messages: Sequence[TargetMessage], *, is_heard: bool) -> None:
        """Tell of what a pass committed; a drafter that does not hear of it catches up later."""
        self._is_behind = not is_heard
        if is_heard:
            self.send(messages)

    def follow(self, schedule: Schedule, beam_width: int | None) -> None:
        """Speak to the drafter of this schedule, tune its beams, and let it catch up if it runs by itself."""
        if schedule != self._schedule:
            self._schedule = schedule
            self.link.use(schedule)
            self.listen()  # another drafter is told of every request before it has its first turn
        if schedule == "beside":
            self.let_catch_up()
        if beam_width != self._beam_width:
            self._beam_width = beam_width
            self._worker.tune(beam_width)

    def let_catch_up(self) -> None:
        """Tell the drafter what it missed while nobody wanted to hear it, whole texts if it asks for them."""
        if self._is_behind:
            self._is_behind = False
            self.send(self._worker.catch_up())
            self.listen()
