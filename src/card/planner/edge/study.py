"""A whole plan for the edge: every association with every rule of shares, judged on virtual clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from card.planner.edge.association import POLICIES, associate
from card.planner.edge.costs import OVERLAPS, EdgeCosts, Terms, edge_costs, terms_of
from card.planner.edge.rounds import run_all, run_plain
from card.planner.edge.scenario import Devices, Floats, Scenario
from card.planner.edge.shares import RULES, Rule, has_solver, share_out
from card.planner.profile import Profile

NUM_TOKENS = 300  # that each device decodes
_QUANTILE = 1.96  # of the normal distribution: half of a 95 % range in standard errors


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """One overlap, association and rule of shares; means over all devices of all scenarios."""

    overlap: str
    association: str
    shares: str
    seconds_per_token: float
    seconds_range: float  # half of the 95 % range of that mean over the scenarios; 0 for one scenario
    joules_per_token: float
    tokens_per_pass: float


@dataclass(frozen=True, slots=True)
class EdgeStudy:
    """A whole study."""

    target: str
    draft: str
    num_devices: int
    num_servers: int
    num_scenarios: int
    plain_seconds: float  # a token without drafters, the servers chosen by compute, equal shares
    has_convex: bool  # False: scipy is not installed
    rows: tuple[EdgeRow, ...]

    def saved(self, row: EdgeRow, *, shares: str = "equal") -> float:
        """Return the share of latency that a row saves on the mean of the other associations with these shares."""
        others = [
            one.seconds_per_token
            for one in self.rows
            if one.overlap == row.overlap and one.shares == shares and one.association != "matching"
        ]
        return 1.0 - row.seconds_per_token / fmean(others)


def make_edge_study(
    scenarios: Sequence[Scenario], target: Profile, draft: Profile, tell: Callable[[str], None] = lambda _: None
) -> EdgeStudy:
    """Plan all scenarios and run them on virtual clocks. Raises: PlanError for a device without a server in reach."""
    rules = [rule for rule in RULES if rule != "convex" or has_solver()]
    found: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    plain: list[float] = []
    for idx, scenario in enumerate(scenarios):
        for overlap in OVERLAPS:
            tell(f"scenario {idx + 1} of {len(scenarios)}, overlap as in {overlap.upper()}")
            costs = edge_costs(scenario, target, draft, overlap)
            terms = terms_of(costs)
            for policy in POLICIES:
                servers = associate(costs, terms, policy, seed=scenario.shadowing_seed)
                for rule in rules:
                    found.setdefault((overlap, policy, rule), []).append(_judge(costs, terms, servers, rule))
        plain.append(_plain(costs, terms))
    rows = tuple(_row(names, runs) for names, runs in found.items())
    return EdgeStudy(
        target=target.name,
        draft=draft.name,
        num_devices=len(scenarios[0].devices),
        num_servers=len(scenarios[0].servers),
        num_scenarios=len(scenarios),
        plain_seconds=fmean(plain),
        has_convex="convex" in rules,
        rows=rows,
    )


def all_shares(terms: Terms, servers: Devices, rule: Rule) -> tuple[Floats, Floats]:
    """Return the shares of bandwidth and of compute of all devices, [N] each."""
    bandwidth, compute = np.empty(len(servers)), np.empty(len(servers))
    for server in np.unique(servers):
        members = np.flatnonzero(servers == server)
        bandwidth[members], compute[members] = share_out(terms, int(server), members, rule)
    return bandwidth, compute


def _judge(costs: EdgeCosts, terms: Terms, servers: Devices, rule: Rule) -> tuple[float, float, float]:
    """Return mean seconds and joules a token, and tokens a pass."""
    runs = run_all(costs, servers, *all_shares(terms, servers, rule), NUM_TOKENS)
    return (
        fmean(run.seconds_per_token for run in runs),
        fmean(run.joules_per_token for run in runs),
        fmean(run.tokens_per_pass for run in runs),
    )


def _plain(costs: EdgeCosts, terms: Terms) -> float:
    servers = associate(costs, terms, "most-compute")
    _, compute = all_shares(terms, servers, "equal")
    return fmean(
        run_plain(costs, server, share) for server, share in zip(servers.tolist(), compute.tolist(), strict=True)
    )


def _row(names: tuple[str, str, str], runs: Sequence[tuple[float, float, float]]) -> EdgeRow:
    seconds, joules, tokens = zip(*runs, strict=True)
    spread = _QUANTILE * stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
    return EdgeRow(*names, fmean(seconds), spread, fmean(joules), fmean(tokens))
