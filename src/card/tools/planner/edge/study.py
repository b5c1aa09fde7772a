"""A plan for the edge: every association with every rule of shares, simulated on virtual clocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from card.tools.planner.edge.association import POLICIES, associate
from card.tools.planner.edge.costs import OVERLAPS, EdgeCosts, edge_costs
from card.tools.planner.edge.figures import Figure, figures_of
from card.tools.planner.edge.rounds import run_all, run_plain
from card.tools.planner.edge.scenario import Devices, Floats, Scenario
from card.tools.planner.edge.shares import RULES, Rule, has_solver, share_out
from card.tools.planner.edge.terms import Terms, terms_of
from card.tools.planner.profile import Profile

NUM_TOKENS = 300  # decoded by each device
_STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for two values and more
_NORMAL_95 = 1.96  # for many


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
    plain_seconds: float  # per token without drafters; servers by compute, equal shares
    has_convex: bool  # False: scipy is not installed
    figures: tuple[Figure, ...]  # of how devices decode
    rows: tuple[EdgeRow, ...]

    def saved(self, row: EdgeRow) -> float:
        """Return the share of latency that a row saves, relative to the mean of other associations in equal shares."""
        others = [
            one.seconds_per_token
            for one in self.rows
            if one.overlap == row.overlap and one.shares == "equal" and one.association != "matching"
        ]
        return 1.0 - row.seconds_per_token / fmean(others)


def make_edge_study(
    scenarios: Sequence[Scenario],
    target: Profile,
    draft: Profile,
    tell: Callable[[str], None] = lambda _: None,
    *,
    sources: Mapping[str, str] | None = None,
) -> EdgeStudy:
    """Plan all scenarios and run them on virtual clocks.

    Args:
        sources: the origin of each figure of decoding, without defaults; all scenarios share the figures.
    Raises: PlanError for a device without a server in reach.
    """
    rules = [rule for rule in RULES if rule != "convex" or has_solver()]
    found: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    plain: list[float] = []
    wrong_passes: list[float] = []
    for idx, scenario in enumerate(scenarios):
        for overlap in OVERLAPS:
            tell(f"scenario {idx + 1} of {len(scenarios)}, overlap as in {overlap.upper()}")
            costs = edge_costs(scenario, target, draft, overlap)
            terms = terms_of(costs)
            for policy in POLICIES:
                servers = associate(costs, terms, policy, seed=scenario.shadowing_seed)
                for rule in rules:
                    judged = judge_shares(costs, servers, *all_shares(terms, servers, rule))
                    found.setdefault((overlap, policy, rule), []).append(judged)
        plain.append(plain_seconds(costs, terms))
        wrong_passes.append(terms.wrong_passes)  # CARD is the last overlap
    rows = tuple(_row(names, runs) for names, runs in found.items())
    return EdgeStudy(
        target=target.name,
        draft=draft.name,
        num_devices=len(scenarios[0].devices),
        num_servers=len(scenarios[0].servers),
        num_scenarios=len(scenarios),
        plain_seconds=fmean(plain),
        has_convex="convex" in rules,
        figures=(
            *figures_of(scenarios[0], sources or {}),
            Figure("wrong_passes", fmean(wrong_passes), "virtual clocks, with these figures"),
        ),
        rows=rows,
    )


def all_shares(terms: Terms, servers: Devices, rule: Rule) -> tuple[Floats, Floats]:
    """Return the shares of bandwidth and of compute of all devices, [N] each."""
    bandwidth, compute = np.empty(len(servers)), np.empty(len(servers))
    for server in np.unique(servers):
        members = np.flatnonzero(servers == server)
        bandwidth[members], compute[members] = share_out(terms, int(server), members, rule)
    return bandwidth, compute


def judge_shares(costs: EdgeCosts, servers: Devices, bandwidth: Floats, compute: Floats) -> tuple[float, float, float]:
    """Return mean seconds and joules a token, and tokens a pass, by virtual clocks."""
    runs = run_all(costs, servers, bandwidth, compute, NUM_TOKENS)
    return (
        fmean(run.seconds_per_token for run in runs),
        fmean(run.joules_per_token for run in runs),
        fmean(run.tokens_per_pass for run in runs),
    )


def plain_seconds(costs: EdgeCosts, terms: Terms) -> float:
    """Return the mean seconds per token without drafters, with servers chosen by compute and shared equally."""
    servers = associate(costs, terms, "most-compute")
    _, compute = all_shares(terms, servers, "equal")
    return fmean(
        run_plain(costs, server, share) for server, share in zip(servers.tolist(), compute.tolist(), strict=True)
    )


def _row(names: tuple[str, str, str], runs: Sequence[tuple[float, float, float]]) -> EdgeRow:
    seconds, joules, tokens = zip(*runs, strict=True)
    return EdgeRow(*names, fmean(seconds), half_range(seconds), fmean(joules), fmean(tokens))


def half_range(values: Sequence[float]) -> float:
    """Return half of the 95 % range of the mean of some values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    quantile = dict(enumerate(_STUDENT_95, 2)).get(len(values), _NORMAL_95)
    return quantile * stdev(values) / math.sqrt(len(values))
