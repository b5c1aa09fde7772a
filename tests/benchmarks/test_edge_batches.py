"""Servers that batch: a pass costs what its rows cost, and drafts that come in time save passes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from card.tools.planner.edge.costs import OVERLAPS, Overlap, edge_costs
from card.tools.planner.edge.scenario import Device, EdgeServer, Scenario
from tests.tools.planner.making import flat

PASS_S = 0.1


@pytest.fixture
def batches(bench: dict[str, ModuleType]) -> ModuleType:
    """The module of servers that batch."""
    return bench["edge_batches"]


def _place(speed: float, acceptance: float = 1.0) -> Scenario:
    """Return a place of four devices of this speed near one server, and of one server that is half as fast."""
    devices = tuple(Device(x_m=10.0 * i, y_m=0.0, speed=speed) for i in range(4))
    servers = (EdgeServer(x_m=20.0, y_m=20.0), EdgeServer(x_m=20.0, y_m=20.0, speed=0.5))
    return Scenario(devices=devices, servers=servers, acceptance=acceptance)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_quick_drafters_that_are_right_fill_the_passes(batches: ModuleType, overlap: Overlap) -> None:
    costs = edge_costs(_place(speed=100.0), flat(PASS_S), flat(0.001), overlap)
    servers = np.zeros(4, np.int64)
    tokens_a_pass = {"pearl": 4.0, "card": 9.0}[overlap]  # a window; a budget of 8 and the target's own
    seconds = batches.batched_seconds(costs, servers, flat(PASS_S), 300)
    assert seconds == pytest.approx(PASS_S / tokens_a_pass, rel=0.1)
    assert batches.batched_plain_seconds(costs, servers, flat(PASS_S)) == pytest.approx(PASS_S)


def test_slow_drafters_leave_a_target_that_never_waits_at_its_plain_speed(batches: ModuleType) -> None:
    costs = edge_costs(_place(speed=0.001, acceptance=0.5), flat(PASS_S), flat(0.01), "card")
    seconds = batches.batched_seconds(costs, np.zeros(4, np.int64), flat(PASS_S), 100)
    assert seconds == pytest.approx(PASS_S, rel=0.02)


def test_devices_go_where_the_pass_stays_the_shortest(batches: ModuleType) -> None:
    costs = edge_costs(_place(speed=1.0), flat(PASS_S), flat(0.01), "pearl")
    assert batches.shortest_pass(costs, flat(PASS_S)).tolist() == [0, 0, 0, 0], "rows cost nothing here"
