"""The desk of a pool: one replica that keeps the table of leases, and the ways to it from targets and drafters.

Calls carry text and whole numbers; answers are JSON of the messages of `card.links.leases` and `allocation`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle

from card.errors import WorkerError
from card.labs.ray.allocation import Allocation, DrafterReport, Wish
from card.links.leases import Lease, NoLease

logger = logging.getLogger(__name__)
_ANSWER_S = 5.0  # for a call to be answered
_Answer = Lease | NoLease


class LeaseDesk:
    """A deployment of one replica. What it knows may be lost: reports and renewals bring it back."""

    def __init__(self) -> None:
        self._pool = Allocation()

    async def report(self, drafter: str) -> None:
        """Take note of a drafter; JSON of a `DrafterReport`."""
        self._pool.report(msgspec.json.decode(drafter, type=DrafterReport), time.monotonic())

    async def retire(self, incarnation: int) -> None:
        """Forget a drafter that ends."""
        self._pool.retire(incarnation)

    async def lease(self, holder: str, wish: str) -> str:
        """Return JSON of a `Lease` or of `NoLease` for JSON of a `Wish`."""
        return as_text(self._pool.lease(holder, msgspec.json.decode(wish, type=Wish), time.monotonic()))

    async def renew(self, holder: str, incarnation: int, wish: str) -> str:
        """Return the same for a lease that is held."""
        return as_text(self._pool.renew(holder, incarnation, msgspec.json.decode(wish, type=Wish), time.monotonic()))

    async def give_back(self, holder: str) -> None:
        """End the lease of the holder, if there is one."""
        self._pool.give_back(holder)

    async def figures(self) -> str:
        """Return JSON of the pool's `PoolFigures`."""
        return as_text(self._pool.figures(time.monotonic()))


class DeskLine:
    """Calls of the desk, one after the other in a thread of their own: a caller waits for none."""

    def __init__(self, desk: DeploymentHandle[Any]) -> None:
        self._desk = desk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="card-desk")

    def call(self, name: str, *args: str | int, answer: Any = None) -> Future[Any]:
        """Call a method of the desk. The future raises WorkerError if there is no answer in time.

        Args:
            answer: what the answer's JSON holds; None if it has none.
        """
        return self._thread.submit(self._call, name, args, answer)

    def close(self) -> None:
        """Let what was called for be answered, and end the thread."""
        self._thread.shutdown(wait=True)

    def _call(self, name: str, args: Sequence[str | int], answer: Any) -> Any:
        method: Any = getattr(self._desk, name)
        try:
            said = method.remote(*args).result(timeout_s=_ANSWER_S)
            return None if answer is None else msgspec.json.decode(said, type=answer)
        except msgspec.MsgspecError:
            raise
        except Exception as error:  # of many kinds, from Ray and from the network below it; its text has addresses
            logger.debug("the desk of the pool does not answer: %s", type(error).__name__)
            raise WorkerError("the desk of the pool does not answer") from None


class RayLeases:
    """The leases of one target, as `card.links.leases.Leases` asks for them."""

    def __init__(self, desk: DeploymentHandle[Any], host: str) -> None:
        """Take the way to the desk, and the address of the target's node."""
        self._line, self._host = DeskLine(desk), host
        self._holder = secrets.token_hex(8)

    def ask(self, tokenizer: str, load: int, avoid: int) -> Future[_Answer]:
        """Ask for a drafter."""
        wish = Wish(tokenizer=tokenizer, load=load, host=self._host, avoid=avoid)
        return self._line.call("lease", self._holder, as_text(wish), answer=_Answer)

    def renew(self, lease: Lease, tokenizer: str, load: int) -> Future[_Answer]:
        """Keep the drafter, or hear which one to move to."""
        wish = Wish(tokenizer=tokenizer, load=load, host=self._host)
        return self._line.call("renew", self._holder, lease.incarnation, as_text(wish), answer=_Answer)

    def give_back(self) -> None:
        """End the lease, if there is one."""
        self._line.call("give_back", self._holder)

    def close(self) -> None:
        """End the way to the desk, after the last word has been said."""
        self._line.close()


def as_text(message: msgspec.Struct) -> str:
    """Return what calls of the desk carry."""
    return msgspec.json.encode(message).decode()
