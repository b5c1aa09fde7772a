"""Associations and shares: what is promised of each holds, and the better rule never loses."""

from __future__ import annotations

import re
from statistics import fmean

import numpy as np
import pytest

from card.errors import PlanError
from card.machine.packages import install_command
from card.tools.planner.edge import shares
from card.tools.planner.edge.association import POLICIES, associate, total_seconds
from card.tools.planner.edge.costs import OVERLAPS, edge_costs
from card.tools.planner.edge.scenario import draw_scenario
from card.tools.planner.edge.shares import RULES, share_out
from card.tools.planner.edge.study import all_shares, half_range, judge_shares, make_edge_study
from card.tools.planner.edge.terms import terms_of
from card.tools.planner.profile import load_profile
from tests.tools.planner.edge.places import DRAFT, TARGET, priced, small


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_device_gets_a_server_in_reach(overlap, policy):
    for seed in range(5):
        costs, terms = priced(small(seed=seed, least_snr_db=5.0), overlap)
        servers = associate(costs, terms, policy, seed=seed)
        assert all(costs.reach[device, server] for device, server in enumerate(servers))
        assert list(servers) == list(associate(costs, terms, policy, seed=seed))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_move_and_no_swap_lowers_the_total_of_a_matching(overlap):
    costs, terms = priced(small(layer_bytes=20_000, token_bytes=20_000), overlap)
    matched = associate(costs, terms, "matching")
    total = total_seconds(terms, matched, "square-root")
    assert total <= total_seconds(terms, associate(costs, terms, "best-signal"), "square-root") + 1e-12
    others = []
    for device in range(len(matched)):
        for server in np.flatnonzero(costs.reach[device]):
            moved = matched.copy()
            moved[device] = server
            others.append(moved)
        for other in range(device):
            swapped = matched.copy()
            swapped[[device, other]] = swapped[[other, device]]
            if costs.reach[device, swapped[device]] and costs.reach[other, swapped[other]]:
                others.append(swapped)
    assert all(total <= total_seconds(terms, one, "square-root") + 1e-8 for one in others)


@pytest.mark.parametrize("rule", RULES)
def test_shares_of_each_server_sum_to_one(rule):
    if rule == "convex":
        pytest.importorskip("scipy")
    costs, terms = priced(small(), "pearl")
    servers = associate(costs, terms, "random")
    bandwidth, compute = all_shares(terms, servers, rule)
    for server in set(servers.tolist()):
        assert bandwidth[servers == server].sum() == pytest.approx(1.0)
        assert compute[servers == server].sum() == pytest.approx(1.0)
    assert (bandwidth > 0).all() and (compute > 0).all()


def test_square_roots_are_the_optimum_where_nothing_overlaps():
    costs, terms = priced(small(acceptance=0.0, token_bytes=50_000, energy_weight=0.0), "pearl")
    members = np.arange(4)
    best = terms.seconds(members, 0, *share_out(terms, 0, members, "square-root")).sum()
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = [part / part.sum() for part in rng.uniform(0.1, 1.0, (2, 4))]
        assert best <= terms.seconds(members, 0, *drawn).sum()
    assert costs.overlap == "pearl"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_convex_shares_are_never_worse_and_better_where_uploads_differ(overlap):
    pytest.importorskip("scipy")
    gains = []
    for seed in range(4):
        costs, terms = priced(small(seed=seed, token_bytes=5_000, layer_bytes=5_000), overlap)
        servers = associate(costs, terms, "random", seed=seed)
        roots, convex = (total_seconds(terms, servers, rule) for rule in ("square-root", "convex"))
        gains.append(1.0 - convex / roots)
    assert min(gains) >= 0.0 and max(gains) > 0.003


def test_convex_shares_without_scipy_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shares, "has_solver", lambda: False)
    _, terms = priced(small(), "card")
    said = f"need scipy, which is not installed; run {install_command('edge')}"
    with pytest.raises(PlanError, match=re.escape(said)):
        share_out(terms, 0, np.arange(3), "convex")
    with pytest.raises(PlanError, match="one of equal, square-root, convex, got 'most'"):
        share_out(terms, 0, np.arange(3), "most")  # type: ignore[arg-type]


@pytest.mark.parametrize(("place", "matters"), [("even", False), ("narrow", True)])
def test_association_matters_to_card_where_servers_differ_in_compute_and_have_narrow_bands(place, matters):
    target, draft = (load_profile(name) for name in ("llama-3.1-70b-4xh100", "llama-3.2-1b-h100"))
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(100, 108):
        costs = edge_costs(draw_scenario(24, seed=seed, place=place), target, draft, "card")
        terms = terms_of(costs)
        for policy, seconds in found.items():
            servers = associate(costs, terms, policy, seed=seed)
            seconds.append(judge_shares(costs, servers, *all_shares(terms, servers, "equal"))[0])
    rivals = min((found[policy] for policy in POLICIES if policy != "matching"), key=sum)
    saved = [1.0 - ours / theirs for ours, theirs in zip(found["matching"], rivals, strict=True)]
    surely = fmean(saved) - half_range(saved)
    assert surely > 0.02 if matters else abs(fmean(saved)) < 0.02


def test_a_study_has_a_row_for_each_way_and_a_range_where_there_are_several_places():
    study = make_edge_study([small(seed=seed) for seed in range(2)], TARGET, DRAFT)
    kinds = {(row.overlap, row.association) for row in study.rows}
    assert kinds == {(overlap, policy) for overlap in OVERLAPS for policy in POLICIES}
    assert all(row.seconds_range > 0 and row.joules_per_token > 0 for row in study.rows)
    others = [row for row in study.rows if row.overlap == "card" and row.shares == "equal"]
    losses = [study.saved(row) for row in others if row.association != "matching"]
    assert sum(losses) == pytest.approx(0.0, abs=1e-12)
