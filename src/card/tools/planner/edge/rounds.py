"""Simulate the rounds of one device and its server: every plan for the edge is judged by this.

Device, radio and server each have a `VirtualClock`. The tokens that the drafter gets right are drawn at random, alike
for every plan of a scenario.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from card.tools.planner.edge.costs import EdgeCosts, sender_watts
from card.tools.planner.edge.scenario import Devices, Floats, Scenario
from card.tools.planner.virtual_time import VirtualClock

WINDOWS_AHEAD = 2  # PEARL's unverified windows per device: one in transit, one in verification


@dataclass(frozen=True, slots=True)
class EdgeRun:
    """Figures of one device, means over its tokens."""

    seconds_per_token: float
    joules_per_token: float
    tokens_per_pass: float


@dataclass(slots=True)
class _Work:
    """Work done so far by one device and its server."""

    tokens: int = 0
    passes: int = 0
    layers: int = 0  # drafted
    sent: int = 0


def run_device(costs: EdgeCosts, device: int, server: int, shares: tuple[float, float], num_tokens: int) -> EdgeRun:
    """Decode ``num_tokens`` and a few more with these shares of the server's bandwidth and compute."""
    place = costs.scenario
    outcomes = Outcomes(place.acceptance, place.hit_rate, seed=place.shadowing_seed * 100_003 + device)
    times = Times(
        draft_s=float(costs.draft_s[device]),
        upload_s=float(costs.upload_s[device, server]) / shares[0],
        verify_s=float(costs.verify_s[server]) / shares[1],
        one_way_s=place.one_way_s,
    )
    if costs.overlap == "pearl":
        seconds, work = _run_windows(times, outcomes, place.num_speculative_tokens, num_tokens)
    else:
        seconds, work = _run_layers(times, outcomes, place, num_tokens)
    computing = place.devices[device].compute_w * work.layers * times.draft_s
    sending = float(sender_watts(place)[device]) * work.sent * times.upload_s
    return EdgeRun(seconds / work.tokens, (computing + sending) / work.tokens, work.tokens / work.passes)


def run_plain(costs: EdgeCosts, server: int, compute: float) -> float:
    """Return the seconds per token of plain decoding on a server, without a drafter."""
    return float(costs.verify_s[server]) / compute


def run_all(costs: EdgeCosts, servers: Devices, bandwidth: Floats, compute: Floats, num_tokens: int) -> list[EdgeRun]:
    """Return the figures of all devices."""
    places = zip(servers.tolist(), bandwidth.tolist(), compute.tolist(), strict=True)
    return [
        run_device(costs, device, server, (upload, verify), num_tokens)
        for device, (server, upload, verify) in enumerate(places)
    ]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one device with its shares of a server."""

    draft_s: float
    upload_s: float
    verify_s: float
    one_way_s: float


class Outcomes:
    """Draws whether the drafter's first choice is right at a place, and if not, whether its tree has the token."""

    def __init__(self, acceptance: float, hit_rate: float, seed: int) -> None:
        """Draw by these chances; the same seed draws the same."""
        self._acceptance, self._hit_rate = acceptance, hit_rate
        self._rng = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def num_right(self, most: int) -> int:
        """Return how many candidates of a chain are right before the first wrong one."""
        return sum(1 for _ in takewhile(lambda _: self._draw() < self._acceptance, range(most)))

    def is_right(self) -> bool:
        """Return whether the first choice is right."""
        return self._draw() < self._acceptance

    def is_hit(self) -> bool:
        """Return whether the tree has the token although its first choice is wrong."""
        return self._draw() < self._hit_rate

    def _draw(self) -> float:
        if not self._drawn:
            self._drawn = self._rng.random(1024).tolist()
        return self._drawn.pop()


def _run_windows(times: Times, outcomes: Outcomes, window: int, num_tokens: int) -> tuple[float, _Work]:
    """Run PEARL: draft, upload and verification of neighbouring windows overlap until one is rejected."""
    device, radio, server, work = VirtualClock(), VirtualClock(), VirtualClock(), _Work()
    verified: deque[float] = deque(maxlen=WINDOWS_AHEAD)  # when the device learns their outcome
    while work.tokens < num_tokens:
        if len(verified) == WINDOWS_AHEAD:
            device.now = max(device.now, verified[0])
        device.advance(window * times.draft_s)
        radio.now = max(radio.now, device.now) + window * times.upload_s
        server.now = max(server.now, radio.now + times.one_way_s) + times.verify_s
        work.layers, work.sent, work.passes = work.layers + window, work.sent + window, work.passes + 1
        right = outcomes.num_right(window)
        work.tokens += min(right + 1, window)
        known = server.now + times.one_way_s
        verified.append(known)
        if right < window:
            work.layers += min(WINDOWS_AHEAD * window, int((known - device.now) / times.draft_s))  # drafted for nothing
            device.now = radio.now = known
            verified.clear()
    return server.now, work


def _run_layers(times: Times, outcomes: Outcomes, place: Scenario, num_tokens: int) -> tuple[float, _Work]:
    """Run CARD: the device drafts layer after layer, and the server verifies what has arrived, back to back."""
    server, work, tree = VirtualClock(), _Work(), Tree(times, outcomes, place)
    while work.tokens < num_tokens:
        tree.grow(server.now)
        right = tree.num_right(work.tokens, server.now, place.budget)
        server.advance(times.verify_s)
        work.passes, work.tokens = work.passes + 1, work.tokens + right + 1
        tree.correct(work.tokens, server.now + times.one_way_s)
    work.layers = work.sent = tree.num_layers
    return server.now, work


@dataclass(slots=True)
class _TreeLayer:
    """One layer of a device's tree."""

    arrives: float
    is_right: bool  # its first candidate is the target's token


class Tree:
    """The tree of a device: layers by their position in the text, each sent when it is made."""

    def __init__(self, times: Times, outcomes: Outcomes, place: Scenario) -> None:
        self._times, self._luck, self._lead, self._kept_share = times, outcomes, place.lead, place.kept_share
        self._device, self._radio = VirtualClock(), VirtualClock()
        self._layers: dict[int, _TreeLayer] = {}
        self._next = 1  # position of the next layer
        self._known = 0  # committed tokens that the device knows of
        self._corrections: deque[tuple[float, int]] = deque()  # when it learns of how many tokens
        self.num_layers = 0

    def grow(self, now: float) -> None:
        """Make all layers that begin before now."""
        while self._device.now <= now:
            free_at = (
                self._radio.now - self._times.draft_s
            )  # a layer that is made sooner only waits, and may become stale
            if self._device.now < free_at:
                self._device.now = free_at
                continue
            self._learn()
            if self._next - self._known > self._lead:
                if not self._corrections:
                    return
                self._device.now = self._corrections[0][0]
                continue
            self._device.advance(self._times.draft_s)
            self._radio.now = max(self._radio.now, self._device.now) + self._times.upload_s
            self._layers[self._next] = _TreeLayer(self._radio.now + self._times.one_way_s, self._luck.is_right())
            self._next, self.num_layers = self._next + 1, self.num_layers + 1

    def num_arrived(self, committed: int, now: float, budget: int) -> int:
        """Return how many of the first ``budget`` layers have arrived."""
        layers = (self._layers.get(committed + 1 + idx) for idx in range(budget))
        return sum(1 for layer in layers if layer is not None and layer.arrives <= now)

    def num_right(self, committed: int, now: float, budget: int) -> int:
        """Return how many of the first ``budget`` candidates have arrived and are right, before the first wrong one."""
        right = 0
        while right < budget and (layer := self._layers.get(committed + right + 1)):
            if layer.arrives > now or not layer.is_right:
                break
            right += 1
        return right

    def correct(self, committed: int, known_at: float) -> None:
        """Record that the target has committed ``committed`` tokens; the device learns of it at ``known_at``.

        If the last token is the first candidate of its layer, all layers below stay; if it is another candidate, a
        share of them; if the tree lacks it, none.
        """
        self._corrections.append((known_at, committed))
        last = self._layers.get(committed)
        if last is not None and not last.is_right:
            depth = int(self._kept_share * (self._next - 1 - committed)) if self._luck.is_hit() else 0
            arrivals = [self._layers[committed + 1 + idx].arrives for idx in range(depth)]
            self._layers = {
                committed + 1 + idx: _TreeLayer(arrives, self._luck.is_right()) for idx, arrives in enumerate(arrivals)
            }
            self._next = committed + depth + 1
            self._device.now, self._radio.now = max(self._device.now, known_at), max(self._radio.now, known_at)
        for position in [one for one in self._layers if one < committed]:
            del self._layers[position]

    def _learn(self) -> None:
        """Read the corrections that have arrived; committed tokens need not be drafted."""
        while self._corrections and self._corrections[0][0] <= self._device.now:
            self._known = self._corrections.popleft()[1]
        self._next = max(self._next, self._known + 1)
