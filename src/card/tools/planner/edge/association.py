"""Assign servers to devices: at random, by signal, by compute, or by two-sided matching with swaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from card.tools.planner.edge.costs import EdgeCosts
from card.tools.planner.edge.scenario import Devices
from card.tools.planner.edge.shares import Rule, share_out
from card.tools.planner.edge.terms import Terms

Policy = Literal["random", "best-signal", "most-compute", "matching"]
POLICIES: tuple[Policy, ...] = ("random", "best-signal", "most-compute", "matching")
_LEAST_GAIN = 1e-9  # seconds; a smaller gain is rounding
_MOST_SWEEPS = 20


def associate(costs: EdgeCosts, terms: Terms, policy: Policy, *, seed: int = 0) -> Devices:
    """Return the server of each device, [N]; all are in reach."""
    if policy == "random":
        rng = np.random.default_rng(seed)
        return np.array([rng.choice(np.flatnonzero(row)) for row in costs.reach], dtype=np.int64)
    signal: Devices = np.argmin(costs.upload_s, axis=1)
    if policy == "best-signal":
        return signal
    if policy == "most-compute":
        return _most_compute(costs)
    return match(costs, terms, signal)


def _most_compute(costs: EdgeCosts) -> Devices:
    """Give each device, in turn, the server that has the most compute for one more."""
    counts = np.zeros(len(costs.verify_s))
    chosen = []
    for row in costs.reach:
        left = np.where(row > 0.0, 1.0 / costs.verify_s / (counts + 1.0), -np.inf)
        chosen.append(int(np.argmax(left)))
        counts[chosen[-1]] += 1.0
    return np.array(chosen, dtype=np.int64)


def total_seconds(terms: Terms, servers: Devices, rule: Rule) -> float:
    """Return the sum of a token's worth over all devices."""
    used = (np.flatnonzero(servers == server) for server in np.unique(servers))
    return sum(server_seconds(terms, int(servers[members[0]]), members, rule) for members in used)


def server_seconds(terms: Terms, server: int, devices: Devices, rule: Rule) -> float:
    """Return the sum for the devices of one server."""
    if not devices.size:
        return 0.0
    return float(terms.seconds(devices, server, *share_out(terms, server, devices, rule)).sum())


def match(costs: EdgeCosts, terms: Terms, start: Devices) -> Devices:
    """Return a matching from which no move of one device, and no swap of two, lowers the total with square-root shares.

    Source: UARA (arXiv:2511.01695), its inequality read so that a lower total is accepted.
    """
    servers = start.copy()
    state = _Totals(terms, servers)
    for _ in range(_MOST_SWEEPS):
        moved = [_try_moves(costs, state, device) for device in range(len(servers))]
        swapped = [_try_swaps(costs, state, device) for device in range(len(servers))]
        if not any(moved) and not any(swapped):
            break
    return servers


class _Totals:
    """Totals of all servers with square-root shares, kept while devices change places.

    These are `server_seconds` in plain Python: a server has about ten devices, too few for arrays to be fast.
    """

    def __init__(self, terms: Terms, servers: Devices) -> None:
        self.servers = servers
        self._peak, self._draft, self._rest = terms.peak, terms.draft.tolist(), terms.rest.tolist()
        self._bound, self._energy = terms.plain.tolist(), terms.energy.tolist()
        self._verify, self._rest_verify = terms.verify.tolist(), terms.rest_verify.tolist()
        roots = np.sqrt(terms.peak * terms.upload + terms.rest_upload)
        with np.errstate(invalid="ignore"):  # out of reach all is infinite, and never used
            self._roots, self._upload = roots.T.tolist(), (terms.upload / roots).T.tolist()
            self._rest_upload = (terms.rest_upload / roots).T.tolist()
        self._members = [set(np.flatnonzero(servers == server).tolist()) for server in range(len(terms.verify))]
        self._totals = [self._total(server) for server in range(len(terms.verify))]

    def change(self, moves: dict[int, int]) -> bool:
        """Move devices if that lowers the total; return whether it did."""
        before = {device: int(self.servers[device]) for device in moves}
        touched = {*before.values(), *moves.values()}
        self._place(moves)
        new = {server: self._total(server) for server in touched}
        if sum(self._totals[server] - new[server] for server in touched) > _LEAST_GAIN:
            for server, total in new.items():
                self._totals[server] = total
            return True
        self._place(before)
        return False

    def _place(self, moves: dict[int, int]) -> None:
        for device, server in moves.items():
            self._members[int(self.servers[device])].discard(device)
            self._members[server].add(device)
            self.servers[device] = server

    def _total(self, server: int) -> float:
        members = self._members[server]
        roots, upload, rest_upload = self._roots[server], self._upload[server], self._rest_upload[server]
        whole, size = sum(roots[device] for device in members), len(members)
        verify, rest_verify = self._verify[server] * size, self._rest_verify[server] * size
        bound = self._bound[server] * size
        total: float = sum(
            min(
                self._peak * max(self._draft[one], upload[one] * whole, verify)
                + self._rest[one]
                + rest_upload[one] * whole
                + rest_verify,
                bound + self._energy[one],
            )
            for one in members
        )
        return total


def _try_moves(costs: EdgeCosts, state: _Totals, device: int) -> bool:
    return _any(
        lambda server: server != state.servers[device] and state.change({device: server}),
        np.flatnonzero(costs.reach[device]),
    )


def _try_swaps(costs: EdgeCosts, state: _Totals, device: int) -> bool:
    def swap(other: int) -> bool:
        here, there = int(state.servers[device]), int(state.servers[other])
        can = here != there and costs.reach[device, there] > 0.0 and costs.reach[other, here] > 0.0
        return bool(can) and state.change({device: there, other: here})

    return _any(swap, np.arange(device + 1, len(state.servers)))


def _any(does: Callable[[int], bool], places: Devices) -> bool:
    """Call ``does`` for all devices, and return whether any call changed something."""
    return any([does(int(place)) for place in places])
