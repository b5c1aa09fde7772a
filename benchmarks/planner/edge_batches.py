"""Servers at the edge that verify for all their devices in one pass, on virtual clocks.

`card plan --edge` divides a server's compute: each device has its own passes. Here a server runs one pass after the
other, and a pass takes what has arrived of all of its devices; how long it takes follows from its rows, by the profile.
Bandwidth is divided evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from card.tools.planner.edge.costs import EdgeCosts
from card.tools.planner.edge.rounds import WINDOWS_AHEAD, Outcomes, Times, Tree
from card.tools.planner.edge.scenario import Devices, Scenario
from card.tools.planner.profile import Profile


class Server:
    """Seconds of a server's passes by their rows."""

    def __init__(self, target: Profile, speed: float) -> None:
        self._cost, self._speed = target.setup().true_cost(), speed

    def seconds(self, rows: int) -> float:
        """Return the seconds of a pass of so many rows."""
        return self._cost.seconds(rows) / self._speed


def servers_of(place: Scenario, target: Profile) -> list[Server]:
    """Return the servers of a place."""
    return [Server(target, one.speed) for one in place.servers]


def rows_of_pass(costs: EdgeCosts) -> int:
    """Return the most rows that a device has in a pass."""
    place = costs.scenario
    return 1 + (place.budget if costs.overlap == "card" else place.num_speculative_tokens)


def shortest_pass(costs: EdgeCosts, target: Profile) -> Devices:
    """Give each device, in turn, the server whose pass is the shortest with one more: `most-compute` for batches."""
    servers, rows = servers_of(costs.scenario, target), rows_of_pass(costs)
    counts, chosen = [0] * len(servers), []
    for row in costs.reach:
        in_reach = np.flatnonzero(row > 0.0).tolist()
        chosen.append(min(in_reach, key=lambda one: servers[one].seconds(rows * (counts[one] + 1))))
        counts[chosen[-1]] += 1
    return np.array(chosen, dtype=np.int64)


def batched_plain_seconds(costs: EdgeCosts, servers: Devices, target: Profile) -> float:
    """Return the mean seconds a token without drafters: a row of each device in a pass."""
    by_server = servers_of(costs.scenario, target)
    counts = np.bincount(servers, minlength=len(by_server)).tolist()
    return fmean(by_server[server].seconds(counts[server]) for server in servers.tolist())


def batched_seconds(costs: EdgeCosts, servers: Devices, target: Profile, num_tokens: int) -> float:
    """Return the mean seconds a token of all devices, each of which decodes so many tokens and a few more."""
    run = _run_trees if costs.overlap == "card" else _run_windows
    by_server, found = servers_of(costs.scenario, target), list[float]()
    for server in np.unique(servers).tolist():
        members = np.flatnonzero(servers == server).tolist()
        found += run(by_server[server], _texts(costs, server, members), costs.scenario, num_tokens)
    return fmean(found)


@dataclass(slots=True)
class _Text:
    """A device's text, and its windows that no pass has verified."""

    times: Times
    outcomes: Outcomes
    tokens: int = 0
    device_free: float = 0.0
    radio_free: float = 0.0
    arrivals: deque[float] = field(default_factory=deque)

    def draft(self, begin: float, window: int) -> None:
        """Draft a window and send it, not before ``begin``."""
        self.device_free = max(self.device_free, begin) + window * self.times.draft_s
        self.radio_free = max(self.radio_free, self.device_free) + window * self.times.upload_s
        self.arrivals.append(self.radio_free + self.times.one_way_s)

    def take(self, right: int, known: float, window: int) -> None:
        """Go on after so many right candidates of the first window; a wrong one costs the windows behind it."""
        self.tokens += min(right + 1, window)
        self.arrivals.popleft()
        if right < window:
            self.arrivals.clear()
            self.device_free = self.radio_free = known
        while len(self.arrivals) < WINDOWS_AHEAD:
            self.draft(known, window)


def _texts(costs: EdgeCosts, server: int, members: Sequence[int]) -> list[_Text]:
    place, share = costs.scenario, 1.0 / len(members)
    return [
        _Text(
            Times(
                draft_s=float(costs.draft_s[device]),
                upload_s=float(costs.upload_s[device, server]) / share,
                verify_s=0.0,
                one_way_s=place.one_way_s,
            ),
            Outcomes(place.acceptance, place.hit_rate, seed=place.shadowing_seed * 100_003 + device),
        )
        for device in members
    ]


def _run_windows(server: Server, texts: Sequence[_Text], place: Scenario, num_tokens: int) -> list[float]:
    """Run PEARL: a pass verifies the first window of each device whose window has arrived."""
    window, now, done = place.num_speculative_tokens, 0.0, dict[int, float]()
    for text in texts:
        for _ in range(WINDOWS_AHEAD):
            text.draft(0.0, window)
    while len(done) < len(texts):
        now = max(now, min(text.arrivals[0] for text in texts))
        batch = [idx for idx, text in enumerate(texts) if text.arrivals[0] <= now]
        now += server.seconds(len(batch) * (1 + window))
        for idx in batch:
            text = texts[idx]
            text.take(text.outcomes.num_right(window), now + place.one_way_s, window)
            if text.tokens >= num_tokens:
                done.setdefault(idx, now / text.tokens)
    return [done[idx] for idx in range(len(texts))]


def _run_trees(server: Server, texts: Sequence[_Text], place: Scenario, num_tokens: int) -> list[float]:
    """Run CARD: each pass has a row of every device and what has arrived of its tree, and never waits."""
    now, done = 0.0, dict[int, float]()
    trees = [Tree(text.times, text.outcomes, place) for text in texts]
    while len(done) < len(texts):
        rows, right = 0, list[int]()
        for text, tree in zip(texts, trees, strict=True):
            tree.grow(now)
            right.append(tree.num_right(text.tokens, now, place.budget))
            rows += 1 + tree.num_arrived(text.tokens, now, place.budget)
        now += server.seconds(rows)
        for idx, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            text.tokens += right[idx] + 1
            tree.correct(text.tokens, now + place.one_way_s)
            if text.tokens >= num_tokens:
                done.setdefault(idx, now / text.tokens)
    return [done[idx] for idx in range(len(texts))]
