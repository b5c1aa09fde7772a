"""Pools: the light model agrees with the real workers in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from card.errors import PlanError
from card.tools.planner.pool import PoolModel, ServiceCurve, make_pool_study, measure_service, most_targets
from card.tools.planner.profile import Overheads
from card.tools.planner.requests import PoolRequest
from card.tools.planner.scenario import Scenario
from card.tools.planner.simulate import Simulator
from card.tools.planner.synthetic import make_synthetic
from tests.tools.planner.making import flat, toy_scenario
from tests.tools.planner.sharing import run_shared

RECORDING = make_synthetic(0.8, num_texts=3, num_tokens=40)


def pool_scenario(**changes: object) -> Scenario:
    """Return targets of 20 ms a pass and a draft server of 3 ms a pass, 1 ms away."""
    defaults = {
        "target": flat(2e-2, 2e-4, overheads=Overheads()),
        "draft": flat(3e-3, 1e-4, overheads=Overheads()),
        "recording": RECORDING,
        "network_s": 1e-3,
    }
    return toy_scenario(**{**defaults, **changes})


SERVICE = ServiceCurve(
    method="card",
    slowdowns=(1.0, 2.0, 8.0),
    tokens_per_s=(100.0, 60.0, 20.0),
    busy_share=(0.5, 0.8, 1.0),
    rounds_per_s=(30.0, 25.0, 20.0),
    nodes_per_pass=4.0,
    context_rows=100.0,
    plain_tokens_per_s=18.0,
)


def pool_model(service: ServiceCurve = SERVICE) -> PoolModel:
    return PoolModel(pool_scenario(), service)


@pytest.mark.parametrize("method", ["card", "pearl"])
def test_the_model_agrees_with_the_real_workers_at_one_to_four_targets(method):
    scenario = pool_scenario()
    simulator, model = (
        Simulator(scenario),
        PoolModel(scenario, measure_service(scenario, method, slowdowns=(1, 1.5, 2, 3))),
    )
    for num_targets in (1, 2, 3, 4):
        runs = run_shared(simulator, method, num_targets=num_targets)
        real = sum(run.num_tokens for run in runs) / sum(run.decode_s for run in runs)
        assert model.run(num_targets).tokens_per_s == pytest.approx(real, rel=0.08)  # 13 us of a round move it by 7 %


def test_more_targets_are_never_served_faster():
    model = pool_model()
    speeds = [model.run(num).tokens_per_s for num in (1, 2, 3, 5, 10, 50, 200, 5000)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == SERVICE.tokens_per_s[0]
    assert speeds[-1] == SERVICE.tokens_per_s[-1]


def test_seldom_requests_are_served_as_if_alone_and_more_load_is_never_faster():
    model = pool_model()
    runs = [model.run(3, load) for load in (1e-4, 0.2, 0.5, 0.8, 1.0, 2.0)]
    assert runs[0].tokens_per_s == pytest.approx(SERVICE.tokens_per_s[0], rel=1e-2)
    speeds = [run.tokens_per_s for run in runs]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == speeds[-2], "always busy is as busy as it gets"
    assert runs[-1].busy_targets == 3


def test_targets_that_seldom_have_something_to_expand_slow_each_other_less():
    at_ease = replace(SERVICE, busy_share=(0.1, 0.2, 0.4))
    assert pool_model(at_ease).run(8).tokens_per_s > 1.1 * pool_model().run(8).tokens_per_s


def test_targets_are_busy_for_longer_as_the_drafter_gets_slower():
    run = pool_model().run(4, 0.3)
    assert run.tokens_per_s < SERVICE.tokens_per_s[0]
    assert run.busy_targets == pytest.approx(4 * 0.3 * SERVICE.tokens_per_s[0] / run.tokens_per_s)
    assert run.speed_up == pytest.approx(run.tokens_per_s / SERVICE.plain_tokens_per_s)


def test_the_most_targets_are_found_by_halving():
    model = pool_model()
    least = model.run(11).tokens_per_s * 1.0001
    assert most_targets(model, load=1.0, least_tokens_per_s=least, limit=500) == 10
    assert most_targets(model, load=1.0, least_tokens_per_s=1e9, limit=500) == 0
    assert most_targets(model, load=1.0, least_tokens_per_s=0.0, limit=37) == 37


def test_a_study_covers_every_delay_and_load_and_is_worse_further_away():
    request = PoolRequest(method="pearl", delays_s=(0.0, 5e-2), loads=(0.3, 1.0), min_speed_up=1.2, max_targets=64)
    scenario = pool_scenario(recording=make_synthetic(0.9, num_texts=2, num_tokens=16))
    study = make_pool_study(scenario, request)
    assert [(point.delay_s, point.load) for point in study.points] == [(0.0, 0.3), (0.0, 1.0), (5e-2, 0.3), (5e-2, 1.0)]
    near, near_loaded, far, _ = study.points
    assert near.most_targets >= near_loaded.most_targets
    assert near.most_targets >= far.most_targets
    assert study == make_pool_study(scenario, request)


def test_a_pool_without_a_network_or_with_impossible_numbers_is_refused():
    with pytest.raises(PlanError, match="delay of a network"):
        measure_service(toy_scenario())
    with pytest.raises(PlanError, match="load above 0"):
        pool_model().run(1, 0.0)
    with pytest.raises(PlanError):
        PoolRequest(loads=())
