"""The desk of a pool: one replica with the table of leases, and its clients in targets and drafters.

Arguments are text and whole numbers; answers are JSON of the messages of `card.links.leases` and `allocation`.
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
_ANSWER_S = 5.0  # timeout of a call
_Answer = Lease | NoLease


class LeaseDesk:
    """A deployment of one replica. Its state may be lost: reports and renewals restore it."""

    def __init__(self) -> None:
        self._pool = Allocation()

    async def report(self, drafter: str) -> None:
        """Add or refresh a drafter; JSON of a `DrafterReport`."""
        self._pool.report(msgspec.json.decode(drafter, type=DrafterReport), time.monotonic())

    async def retire(self, incarnation: int) -> None:
        """Remove a drafter that ends."""
        self._pool.retire(incarnation)

    async def lease(self, holder: str, wish: str) -> str:
        """Return JSON of a `Lease` or of `NoLease` for JSON of a `Wish`."""
        return as_text(self._pool.lease(holder, msgspec.json.decode(wish, type=Wish), time.monotonic()))

    async def renew(self, holder: str, incarnation: int, wish: str) -> str:
        """Renew a lease; arguments and result as of `lease`."""
        return as_text(self._pool.renew(holder, incarnation, msgspec.json.decode(wish, type=Wish), time.monotonic()))

    async def give_back(self, holder: str) -> None:
        """End the lease of the holder, if there is one."""
        self._pool.give_back(holder)

    async def figures(self) -> str:
        """Return JSON of the pool's `PoolFigures`."""
        return as_text(self._pool.figures(time.monotonic()))


class DeskLine:
    """Calls the desk in a thread of its own, one call after the other, so that no caller blocks."""

    def __init__(self, desk: DeploymentHandle[Any]) -> None:
        self._desk = desk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="card-desk")

    def call(self, name: str, *args: str | int, answer: Any = None) -> Future[Any]:
        """Call a method of the desk. The future raises WorkerError if there is no answer in time.

        Args:
            answer: type of the answer's JSON; None if there is none.
        """
        return self._thread.submit(self._call, name, args, answer)

    def close(self) -> None:
        """Finish the pending calls, and end the thread."""
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
    """The leases of one target, in the protocol of `card.links.leases.Leases`."""

    def __init__(self, desk: DeploymentHandle[Any], host: str) -> None:
        """Use this desk; ``host`` is the address of the target's node."""
        self._line, self._host = DeskLine(desk), host
        self._holder = secrets.token_hex(8)

    def ask(self, tokenizer: str, load: int, avoid: int) -> Future[_Answer]:
        """Ask for a drafter."""
        wish = Wish(tokenizer=tokenizer, load=load, host=self._host, avoid=avoid)
        return self._line.call("lease", self._holder, as_text(wish), answer=_Answer)

    def renew(self, lease: Lease, tokenizer: str, load: int) -> Future[_Answer]:
        """Keep the drafter, or return the one to move to."""
        wish = Wish(tokenizer=tokenizer, load=load, host=self._host)
        return self._line.call("renew", self._holder, lease.incarnation, as_text(wish), answer=_Answer)

    def give_back(self) -> None:
        """End the lease, if there is one."""
        self._line.call("give_back", self._holder)

    def close(self) -> None:
        """Close the line to the desk after its last call."""
        self._line.close()


def as_text(message: msgspec.Struct) -> str:
    """Return a message as JSON text, the argument of calls to the desk."""
    return msgspec.json.encode(message).decode()
