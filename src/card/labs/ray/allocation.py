"""Allocate the drafters of a pool to targets: a state machine without clock, I/O or Ray.

Drafters report regularly and are removed when they stop. A target holds at most one lease; without renewals the lease
expires. The table may be lost with its process: reports restore the drafters, and renewals the leases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from card.links.leases import Lease, NoLease

LOAD = "targets"  # the metric that drafters report to Serve: how many targets each of them serves
LEASE_S = 10.0  # without renewal until a lease expires; five times as long as targets wait
SILENCE_S = 10.0  # without a report until a drafter is removed
SETTLE_S = 10.0  # from a lease's start until it may be moved: moving costs the target a few drafts


class DrafterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's report to the desk."""

    address: str  # tcp://host:port
    incarnation: int  # number of this start of it, above 0
    tokenizer: str  # fingerprint
    host: str  # the only host that can reach it; empty: every host can
    max_targets: int  # at once


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Needs of a target."""

    tokenizer: str  # fingerprint
    load: int  # open requests
    host: str  # where the target runs
    avoid: int = 0  # incarnation of a drafter that has just failed; any other is better


class PoolFigures(msgspec.Struct, kw_only=True):
    """Figures of the pool."""

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
    """A lease, with the times of its grant and last renewal."""

    incarnation: int
    load: int
    since: float
    renewed_at: float

    @property
    def weight(self) -> int:
        """The load on its drafter: a session has a cost even without requests."""
        return 1 + self.load


@dataclass(slots=True)
class Allocation:
    """Drafters, and the leases on them by holder. Callers give the time, in seconds; it never goes back."""

    _drafters: dict[int, _Drafter] = field(default_factory=dict)  # by incarnation
    _held: dict[str, _Held] = field(default_factory=dict)  # by holder
    _totals: PoolFigures = field(default_factory=PoolFigures)

    def report(self, drafter: DrafterReport, now: float) -> None:
        """Add or refresh a drafter. It replaces another one at the same address."""
        self._expire(now)
        place = (drafter.host, drafter.address)
        for incarnation, known in list(self._drafters.items()):
            if incarnation != drafter.incarnation and (known.report.host, known.report.address) == place:
                self.retire(incarnation)
        self._drafters[drafter.incarnation] = _Drafter(drafter, now)

    def retire(self, incarnation: int) -> None:
        """Remove a drafter, and the leases on it."""
        self._drafters.pop(incarnation, None)
        self._held = {holder: held for holder, held in self._held.items() if held.incarnation != incarnation}

    def lease(self, holder: str, wish: Wish, now: float) -> Lease | NoLease:
        """Give the holder the drafter with the least load; its former lease ends."""
        self._expire(now)
        self._held.pop(holder, None)
        chosen = self._least_loaded(wish)
        if chosen is None:
            self._totals.refused += 1
            return NoLease(self._why_none(wish))
        self._totals.granted += 1
        return self._hold(holder, chosen, wish, now)

    def renew(self, holder: str, incarnation: int, wish: Wish, now: float) -> Lease | NoLease:
        """Keep the lease on the drafter of this incarnation, or move it to one with clearly less load.

        An unknown lease on a known drafter is restored: it may have been given before this table was lost.
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
        """Return the pool's figures."""
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
        """Return whether the drafter can draft for this target at all."""
        return drafter.tokenizer == wish.tokenizer and drafter.host in ("", wish.host)

    def _is_open_to(self, drafter: DrafterReport, wish: Wish) -> bool:
        """Return whether the drafter fits and has room."""
        num_held = sum(held.incarnation == drafter.incarnation for held in self._held.values())
        return self._fits(drafter, wish) and num_held < drafter.max_targets

    def _weight(self, incarnation: int) -> int:
        return sum(held.weight for held in self._held.values() if held.incarnation == incarnation)

    def _least_loaded(self, wish: Wish) -> int | None:
        """Return the drafter with the least load, the oldest of several; ``avoid`` only if there is no other."""
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
    """Requests one drafter per ``targets_per_drafter`` busy targets, at least one; Serve applies bounds and delays."""

    def __init__(self, targets_per_drafter: float) -> None:
        self._targets_per_drafter = targets_per_drafter

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of drafters, and no state.

        Args:
            ctx: Serve's `AutoscalingContext`.
        """
        by_replica = (ctx.aggregated_metrics or {}).get(LOAD, {})
        return max(1, math.ceil(sum(by_replica.values()) / self._targets_per_drafter)), {}
