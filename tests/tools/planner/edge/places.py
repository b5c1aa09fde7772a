"""Small scenarios and prices, shared by the tests of plans for the edge."""

from __future__ import annotations

from typing import Any

import msgspec

from card.tools.planner.edge.costs import EdgeCosts, Overlap, edge_costs
from card.tools.planner.edge.scenario import Scenario, draw_scenario
from card.tools.planner.edge.terms import Terms, terms_of
from tests.tools.planner.making import flat

TARGET, DRAFT = flat(0.018), flat(0.0026)


def small(num_devices: int = 8, *, seed: int = 0, **changes: Any) -> Scenario:
    """Return a scenario of three servers, close enough for all devices to reach one."""
    drawn = draw_scenario(num_devices, num_servers=3, seed=seed)
    return msgspec.structs.replace(drawn, **changes)


def priced(scenario: Scenario, overlap: Overlap) -> tuple[EdgeCosts, Terms]:
    """Return its costs and their coefficients."""
    costs = edge_costs(scenario, TARGET, DRAFT, overlap)
    return costs, terms_of(costs)
