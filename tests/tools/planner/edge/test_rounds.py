"""Rounds on virtual clocks: exact where nothing is left to chance, and as the closed form says on average."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from card.errors import PlanError
from card.tools.planner.edge.costs import EdgeCosts, Overlap, edge_costs
from card.tools.planner.edge.rounds import run_device, run_plain
from card.tools.planner.edge.terms import terms_of
from tests.tools.planner.edge.places import DRAFT, TARGET, priced, small

WINDOW, BUDGET = 4, 8


def _costs(overlap: Overlap, *, draft: float, upload: float, verify: float, **changes: float) -> EdgeCosts:
    costs, _ = priced(small(1, num_speculative_tokens=WINDOW, budget=BUDGET, **changes), overlap)
    return dataclasses.replace(
        costs, draft_s=np.full(1, draft), upload_s=np.full((1, 3), upload), verify_s=np.full(3, verify)
    )


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_windows_that_are_accepted_take_as_long_as_the_slowest_of_draft_upload_and_verification(slowest):
    draft, upload, verify = ((0.05, 0.01, 0.04), (0.01, 0.05, 0.04), (0.01, 0.01, 0.2))[slowest]
    costs = _costs("pearl", draft=draft, upload=upload, verify=verify, acceptance=1.0, one_way_s=0.0)
    run = run_device(costs, 0, 0, (1.0, 1.0), 4000)
    assert run.tokens_per_pass == WINDOW
    assert run.seconds_per_token == pytest.approx(0.05, rel=0.01)


def test_a_rejected_window_empties_the_pipeline():
    costs = _costs("pearl", draft=0.01, upload=0.002, verify=0.05, acceptance=0.0, one_way_s=0.003)
    run = run_device(costs, 0, 0, (0.5, 0.25), 1000)
    assert run.tokens_per_pass == 1.0
    assert run.seconds_per_token == pytest.approx(WINDOW * (0.01 + 0.004) + 0.2 + 0.006, rel=0.01)


def test_a_tree_that_is_always_right_fills_every_pass_and_one_that_never_is_costs_nothing():
    right = _costs("card", draft=0.001, upload=0.0, verify=0.1, acceptance=1.0, one_way_s=0.0)
    run = run_device(right, 0, 0, (1.0, 1.0), 2000)
    assert run.tokens_per_pass == pytest.approx(BUDGET + 1, rel=0.07)
    wrong = _costs("card", draft=0.001, upload=0.0, verify=0.1, acceptance=0.0, hit_rate=0.0)
    run = run_device(wrong, 0, 0, (1.0, 1.0), 500)
    assert (run.tokens_per_pass, run.seconds_per_token) == (1.0, pytest.approx(0.1))


@pytest.mark.parametrize("verify", [0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("draft", [0.01, 0.04])
def test_layers_are_never_slower_than_plain_decoding(draft, verify):
    costs = _costs("card", draft=draft, upload=0.01, verify=verify)
    plain = run_plain(costs, 0, 0.5)
    assert plain == pytest.approx(2 * verify)
    assert run_device(costs, 0, 0, (0.5, 0.5), 500).seconds_per_token <= plain * (1 + 1e-9)


@pytest.mark.parametrize("verify", [0.04, 0.08, 0.12, 0.2, 0.4])
@pytest.mark.parametrize(("overlap", "within"), [("pearl", 0.08), ("card", 0.03)])
def test_the_closed_form_is_near_the_mean_of_many_rounds(overlap, within, verify):
    changed = {"acceptance": 0.8, "hit_rate": 0.6, "energy_weight": 0.0}
    from_terms = edge_costs(small(1, **changed), TARGET, DRAFT, overlap)
    costs = dataclasses.replace(
        from_terms, draft_s=np.full(1, 0.026), upload_s=np.full((1, 3), 0.004), verify_s=np.full(3, verify)
    )
    told = terms_of(costs).seconds(np.array([0]), 0, np.ones(1), np.ones(1))[0]
    run = run_device(costs, 0, 0, (1.0, 1.0), 4000)
    assert run.seconds_per_token == pytest.approx(told, rel=within)


@pytest.mark.parametrize(("overlap", "within"), [("pearl", 0.05), ("card", 0.1)])
def test_the_closed_form_of_a_whole_place_is_near_its_clocks(overlap, within):
    costs, terms = priced(small(12, energy_weight=0.0), overlap)
    devices, share = np.arange(12), np.full(12, 1 / 12)
    told = terms.seconds(devices, 0, share, share).mean()
    runs = [run_device(costs, device, 0, (1 / 12, 1 / 12), 2000).seconds_per_token for device in range(12)]
    assert np.mean(runs) == pytest.approx(told, rel=within)


def test_layers_that_live_on_below_another_candidate_save_passes():
    lost, kept = (
        run_device(_costs("card", draft=0.02, upload=0.004, verify=0.1, kept_share=share), 0, 0, (1.0, 1.0), 3000)
        for share in (0.0, 1.0)
    )
    assert kept.tokens_per_pass > 1.05 * lost.tokens_per_pass


def test_the_same_scenario_takes_the_same_time_to_the_last_bit():
    costs, _ = priced(small(), "card")
    assert run_device(costs, 3, 1, (0.2, 0.3), 200) == run_device(costs, 3, 1, (0.2, 0.3), 200)


def test_an_unknown_overlap_is_refused():
    with pytest.raises(PlanError, match="one of pearl, card, got 'turns'"):
        edge_costs(small(), TARGET, DRAFT, "turns")  # type: ignore[arg-type]
