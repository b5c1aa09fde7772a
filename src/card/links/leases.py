"""A drafter on lease from a pool: the pool only names the draft server to use.

Tokens travel over the link to that server. A slow, wrong or dead pool costs speed but changes no text: calls to it
never block, and the target decodes plainly until it has a lease.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from card.drafting.messages import Close, DrafterMessage, Open, TargetMessage
from card.errors import SettingsError, plain_words
from card.links.keys import check_address
from card.links.remote import RemoteLink

logger = logging.getLogger(__name__)
RENEW_S = 2.0  # between renewals; a pool drops a lease that is not renewed for several times as long
IDLE_S = 10.0  # without requests until the drafter is given back
BUSY_LOOK_S = 0.5  # a target with requests checks its link more often than this; one without, once a second
MOST_PAUSE_S = 5.0  # between requests to a pool without a free drafter
_NO_REQUESTS = "there are no requests"
_SILENT_POOL = "the pool does not answer"


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """A drafter that a target may use."""

    address: str  # tcp://host:port of its server
    incarnation: int  # differs for each start of a server at the same address


class NoLease(msgspec.Struct, frozen=True, tag="none"):
    """The reason why there is no lease, or why it has ended."""

    reason: str


class Leases(Protocol):
    """A target's connection to the pool. Calls return at once and reach the pool in order.

    An answer that is an exception counts as no answer.
    """

    def ask(self, tokenizer: str, load: int, avoid: int) -> Future[Lease | NoLease]:
        """Ask for a drafter with this tokenizer.

        Args:
            load: number of open requests.
            avoid: incarnation of a drafter that has just failed; 0: none.
        """

    def renew(self, lease: Lease, tokenizer: str, load: int) -> Future[Lease | NoLease]:
        """Report that the drafter is still in use. The answer is this lease, another one to use, or its end."""

    def give_back(self) -> None:
        """End all leases requested so far."""


class LeasedLink(RemoteLink):
    """Talks to the draft server that the pool names, perhaps another one for each incarnation.

    A lease is held while there are requests, and for `IDLE_S` after the last one.
    """

    def __init__(
        self,
        leases: Leases,
        *,
        vocab_size: int,
        tokenizer: str,
        least_layers: int = 1,
        keys: Path | None = None,
        start_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        """Read the keys; nothing is sent yet. Arguments as in `RemoteLink`; the caller closes ``leases``.

        Raises: SettingsError for keys that cannot be read.
        """
        super().__init__(
            None,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            least_layers=least_layers,
            keys=keys,
            start_timeout_s=start_timeout_s,
            silence_timeout_s=silence_timeout_s,
        )
        self._leases = leases
        self.lease: Lease | None = None  # the present lease
        self._asked: Future[Lease | NoLease] | None = None
        self._renewal: Future[Lease | NoLease] | None = None
        self._renewed_at = 0.0
        self._failed = 0  # incarnation of the last drafter that was lost
        self._open_ids: set[int] = set()
        self._looked_at = self._wanted_at = time.monotonic()
        self._is_resting = False
        self._refused_for = ""

    def send(self, message: TargetMessage) -> None:
        """Send the message unless there is no drafter; open requests are counted as the load."""
        if isinstance(message, Open):
            self._open_ids.add(message.request_id)
        elif isinstance(message, Close):
            self._open_ids.discard(message.request_id)
        self._wanted_at = time.monotonic()
        super().send(message)

    def receive(self) -> list[DrafterMessage]:
        """Return the messages that have arrived; check session and lease now and then."""
        now = time.monotonic()
        if now - self._looked_at < BUSY_LOOK_S:
            self._wanted_at = now
        self._looked_at = now
        return super().receive()

    def _not_started(self, reason: str) -> str:
        return f"no drafter of the pool can be used: {reason}"

    def _lost(self, reason: str, *, is_first: bool) -> str:
        return f"session {self._watch.incarnation} with a drafter of the pool is lost: {reason}"

    def _open(self) -> None:
        self._watch.begin(time.monotonic())
        self._asked = self._leases.ask(self._tokenizer, len(self._open_ids), self._failed)

    def _drop(self) -> None:
        super()._drop()
        self._return_lease()

    def _farewell(self) -> None:
        super()._farewell()
        self._return_lease()

    def _supervise(self, now: float) -> None:
        if now - self._wanted_at > IDLE_S:
            if not self._is_resting:
                self._rest()
            return
        if self._is_resting:
            self._is_resting = False
            self._watch.forgive()
        super()._supervise(now)

    def _is_lost(self, now: float) -> bool:
        if self._asked is not None:
            return self._is_refused(self._asked, now)
        if self.lease is not None and self._is_replaced(self.lease, now):
            return True
        return super()._is_lost(now)

    def _complaint(self, now: float) -> str:
        return _SILENT_POOL if self._asked is not None else super()._complaint(now)

    def _fail(self, reason: str) -> None:
        if self.lease is not None:
            self._failed = self.lease.incarnation
        super()._fail(reason)

    # ---- the lease --------------------------------------------------------------------------------------------------

    def _is_refused(self, asked: Future[Lease | NoLease], now: float) -> bool:
        """Read the pool's answer if it is there; return whether no drafter is available."""
        if not asked.done():
            return False
        self._asked = None
        answer = NoLease(_SILENT_POOL) if asked.exception() is not None else asked.result()
        if isinstance(answer, Lease):
            return not self._use(answer, now)
        reason = plain_words(answer.reason)
        if reason != self._refused_for:
            logger.info("no drafter from the pool: %s", reason)
        self._refused_for = reason
        self._watch.fail(now, reason, MOST_PAUSE_S)
        return True

    def _is_replaced(self, lease: Lease, now: float) -> bool:
        """Renew the lease when it is due; return whether the pool ended it or named another drafter."""
        if self._renewal is None:
            if now - self._renewed_at >= RENEW_S:
                self._renewed_at = now
                self._renewal = self._leases.renew(lease, self._tokenizer, len(self._open_ids))
            return False
        if not self._renewal.done():
            return False
        renewal, self._renewal = self._renewal, None
        if renewal.exception() is not None:
            return False  # the drafter is usable even if the pool does not answer
        answer = renewal.result()
        if isinstance(answer, NoLease):
            self.lease = None
            self._fail(f"the pool has ended the lease: {plain_words(answer.reason)}")
            return True
        if answer != lease:
            self._take_leave()
            self._watch.begin(now)
            self._use(answer, now)
            return True
        return False

    def _use(self, lease: Lease, now: float) -> bool:
        """Begin a session with a drafter; return whether its address is valid."""
        self.lease, self._renewed_at, self._refused_for = lease, now, ""
        try:
            self._reach_out(check_address(lease.address))
        except (SettingsError, zmq.ZMQError):
            self._fail("the pool named an invalid address")
            return False
        return True

    def _rest(self) -> None:
        """Give the drafter back until there are requests again."""
        self._is_resting = True
        self._take_leave()
        self._return_lease()
        self._watch.end(_NO_REQUESTS)

    def _return_lease(self) -> None:
        if self.lease is not None or self._asked is not None:
            self._leases.give_back()
        self.lease = self._asked = self._renewal = None
