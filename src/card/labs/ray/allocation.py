"""Sharing out the drafters of a pool among targets: a state machine without a clock, without I/O, without Ray.

Drafters report themselves and are forgotten when they are silent. A target holds at most one lease, which it renews;
one that is not renewed expires. Both may be lost with the process that runs this: reports bring the drafters back, and
renewals the leases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from card.links.leases import Lease, NoLease

LOAD = "targets"  # the figure that drafters tell Serve: how many targets each of them serves
LEASE_S = 10.0  # without renewal, after which a lease has expired; five times as long as targets wait
SILENCE_S = 10.0  # without a report, after which a drafter is forgotten
SETTLE_S = 10.0  # that a lease stays where it is before it may be moved: moving costs the target a few drafts


class DrafterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's account of itself."""

    address: str  # tcp://host:port
    incarnation: int  # above 0, of this life of it
    tokenizer: str  # fingerprint
    host: str  # that alone can reach it; empty: every host can
    max_targets: int  # at once


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Needs of a target."""

    tokenizer: str  # fingerprint
    load: int  # requests that are open
    host: str  # where the target runs
    avoid: int = 0  # incarnation of a drafter that has just failed it; another one is better


class PoolFigures(msgspec.Struct, kw_only=True):
    """The pool at a glance."""

    drafters: int = 0
    leases: int = 0
    load: int = 0  # requests of all leases
    granted: int = 0  # in total
    refused: int = 0
    expired: int = 0
    moved: int = 0


@dataclass(slots=True)
class _Drafter:
    report: DrafterReport
    heard_at: float


@dataclass(slots=True)
class _Held:
    """A lease, and when it was given and last renewed."""

    incarnation: int
    load: int
    since: float
    renewed_at: float

    @property
    def weight(self) -> int:
        """Its load on its drafter: a session costs something even while it has no requests."""
        return 1 + self.load


@dataclass(slots=True)
class Allocation:
    """Drafters, and the leases on them by holder. Times are the caller's, in seconds, and never go back."""

    _drafters: dict[int, _Drafter] = field(default_factory=dict)  # by incarnation
    _held: dict[str, _Held] = field(default_factory=dict)  # by holder
    _totals: PoolFigures = field(default_factory=PoolFigures)

    def report(self, drafter: DrafterReport, now: float) -> None:
        """Take note of a drafter that is ready. One at the address of another one has taken its place."""
        self._expire(now)
        place = (drafter.host, drafter.address)
        for incarnation, known in list(self._drafters.items()):
            if incarnation != drafter.incarnation and (known.report.host, known.report.address) == place:
                self.retire(incarnation)
        self._drafters[drafter.incarnation] = _Drafter(drafter, now)

    def retire(self, incarnation: int) -> None:
        """Forget a drafter, and the leases on it."""
        self._drafters.pop(incarnation, None)
        self._held = {holder: held for holder, held in self._held.items() if held.incarnation != incarnation}

    def lease(self, holder: str, wish: Wish, now: float) -> Lease | NoLease:
        """Give the holder the drafter with the least to do; what it held before is gone."""
        self._expire(now)
        self._held.pop(holder, None)
        chosen = self._least_loaded(wish)
        if chosen is None:
            self._totals.refused += 1
            return NoLease(self._why_none(wish))
        self._totals.granted += 1
        return self._hold(holder, chosen, wish, now)

    def renew(self, holder: str, incarnation: int, wish: Wish, now: float) -> Lease | NoLease:
        """Keep the lease on the drafter of this incarnation, or move it to one with clearly less to do.

        A lease that is not known is taken up if its drafter is: it may have been given before this table was lost.
        """
        self._expire(now)
        drafter = self._drafters.get(incarnation)
        held = self._held.pop(holder, None)
        if drafter is None:
            return NoLease("the drafter is gone")
        if not self._is_open_to(drafter.report, wish):
            return NoLease("the drafter is taken by others, or cannot draft for this target")
        since = held.since if held is not None and held.incarnation == incarnation else now
        other = self._least_loaded(wish)
        if other is not None and now - since >= SETTLE_S and self._weight(other) < self._weight(incarnation):
            self._totals.moved += 1
            return self._hold(holder, other, wish, now)
        return self._hold(holder, incarnation, wish, now, since=since)

    def give_back(self, holder: str) -> None:
        """End the lease of the holder, if there is one."""
        self._held.pop(holder, None)

    def figures(self, now: float) -> PoolFigures:
        """Return how things stand."""
        self._expire(now)
        load = sum(held.load for held in self._held.values())
        return msgspec.structs.replace(self._totals, drafters=len(self._drafters), leases=len(self._held), load=load)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _hold(self, holder: str, incarnation: int, wish: Wish, now: float, *, since: float | None = None) -> Lease:
        self._held[holder] = _Held(incarnation, wish.load, now if since is None else since, now)
        return Lease(self._drafters[incarnation].report.address, incarnation)

    def _expire(self, now: float) -> None:
        for incarnation, drafter in list(self._drafters.items()):
            if now - drafter.heard_at > SILENCE_S:
                self.retire(incarnation)
        for holder, held in list(self._held.items()):
            if now - held.renewed_at > LEASE_S:
                del self._held[holder]
                self._totals.expired += 1

    def _fits(self, drafter: DrafterReport, wish: Wish) -> bool:
        """Return whether the drafter can draft for such a target at all."""
        return drafter.tokenizer == wish.tokenizer and drafter.host in ("", wish.host)

    def _is_open_to(self, drafter: DrafterReport, wish: Wish) -> bool:
        """Return whether the drafter fits and has a place."""
        num_held = sum(held.incarnation == drafter.incarnation for held in self._held.values())
        return self._fits(drafter, wish) and num_held < drafter.max_targets

    def _weight(self, incarnation: int) -> int:
        return sum(held.weight for held in self._held.values() if held.incarnation == incarnation)

    def _least_loaded(self, wish: Wish) -> int | None:
        """Return the drafter with the least to do, the oldest of several; one to avoid only if there is no other."""
        able = [one.report for one in self._drafters.values() if self._is_open_to(one.report, wish)]
        order = {
            report.incarnation: (report.incarnation == wish.avoid, self._weight(report.incarnation)) for report in able
        }
        return min(order, key=lambda incarnation: order[incarnation], default=None)

    def _why_none(self, wish: Wish) -> str:
        reports = [drafter.report for drafter in self._drafters.values()]
        if not reports:
            return "it has no drafter yet"
        alike = [report for report in reports if report.tokenizer == wish.tokenizer]
        if not alike:
            return "its drafters have another tokenizer than the target"
        if not any(self._fits(report, wish) for report in alike):
            return "its drafters serve other hosts only: give the pool keys"
        return "its drafters have as many targets as they take"


class ByTargets:
    """Asks for one drafter for so many busy targets, and for one at least; Serve keeps to the bounds and delays."""

    def __init__(self, targets_per_drafter: float) -> None:
        self._targets_per_drafter = targets_per_drafter

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of drafters, and nothing to remember.

        Args:
            ctx: Serve's `AutoscalingContext`.
        """
        by_replica = (ctx.aggregated_metrics or {}).get(LOAD, {})
        return max(1, math.ceil(sum(by_replica.values()) / self._targets_per_drafter)), {}
