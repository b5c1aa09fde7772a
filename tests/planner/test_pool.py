"""Pools: the light model agrees with the real workers in virtual time, and with a slow simulation of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card.errors import PlanError
from card.planner.pool import PoolModel, Service, make_pool_study, measure_service, most_targets, simulate_pool
from card.planner.profile import Overheads
from card.planner.requests import PoolRequest
from card.planner.scene import Scene
from card.planner.simulate import Simulator
from card.planner.synthetic import make_synthetic
from tests.planner.making import flat, toy_scene
from tests.planner.sharing import run_shared

RECORDING = make_synthetic(0.8, num_texts=3, num_tokens=40)


def pool_scene(**changes: object) -> Scene:
    """Return targets of 20 ms a pass and a draft server of 3 ms a pass, 1 ms away."""
    defaults = {
        "target": flat(2e-2, 2e-4, overheads=Overheads()),
        "draft": flat(3e-3, 1e-4, overheads=Overheads()),
        "recording": RECORDING,
        "network_s": 1e-3,
    }
    return toy_scene(**{**defaults, **changes})


SERVICE = Service(
    method="card",
    slowdowns=(1.0, 2.0, 8.0),
    tokens_per_s=(100.0, 60.0, 20.0),
    busy_share=(0.5, 0.8, 1.0),
    rounds_per_s=(30.0, 25.0, 20.0),
    nodes_per_pass=4.0,
    context_rows=100.0,
    plain_tokens_per_s=18.0,
)


def pool_model(service: Service = SERVICE) -> PoolModel:
    return PoolModel(pool_scene(), service)


@pytest.mark.parametrize("method", ["card", "pearl"])
def test_the_model_agrees_with_the_real_workers_at_one_to_four_targets(method):
    scene = pool_scene()
    simulator, model = Simulator(scene), PoolModel(scene, measure_service(scene, method, slowdowns=(1, 1.5, 2, 3)))
    for num_targets in (1, 2, 3, 4):
        runs = run_shared(simulator, method, num_targets=num_targets)
        real = sum(run.num_tokens for run in runs) / sum(run.decode_s for run in runs)
        assert model.tokens_per_s(num_targets) == pytest.approx(real, rel=0.06)


def test_more_targets_are_never_served_faster():
    model = pool_model()
    speeds = [model.tokens_per_s(num) for num in (1, 2, 3, 5, 10, 50, 200, 5000)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == SERVICE.tokens_per_s[0]
    assert speeds[-1] == SERVICE.tokens_per_s[-1]


def test_targets_that_are_always_busy_have_the_speed_of_so_many():
    model = pool_model()
    run = simulate_pool(model, [100], num_targets=6, load=1.0, num_requests=5)
    assert run.tokens_per_s == pytest.approx(model.tokens_per_s(6))
    assert run.slow_tokens_per_s == pytest.approx(run.tokens_per_s)
    assert run.busy_targets == pytest.approx(6)


def test_seldom_requests_are_served_as_if_alone():
    model = pool_model()
    run = simulate_pool(model, [100, 50], num_targets=3, load=1e-4)
    assert run.tokens_per_s == pytest.approx(model.tokens_per_s(1), rel=1e-2)
    assert run.wait_s == pytest.approx(0.0, abs=1e-2)


@given(num_targets=st.integers(1, 5), load=st.floats(0.1, 0.9), seed=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_events_agree_with_a_clock_that_ticks(num_targets, load, seed):
    model = pool_model()
    lengths = [20, 40]
    run = simulate_pool(model, lengths, num_targets=num_targets, load=load, num_requests=6, seed=seed)
    slow = ticking_pool(model, lengths, num_targets, load, 6, seed)
    assert run.tokens_per_s == pytest.approx(slow, rel=0.02)


def ticking_pool(model, lengths, num_targets, load, num_requests, seed) -> float:
    """Return the mean speed in a pool whose time goes in small steps; the same requests come at the same moments."""
    rng = np.random.default_rng(seed)
    total = num_targets * num_requests
    each_s = float(np.mean(lengths)) / model.tokens_per_s(1)
    arrivals = np.cumsum(rng.exponential(each_s / (load * num_targets), total))
    owners, sizes = rng.integers(0, num_targets, total), rng.choice(np.asarray(lengths), total)
    queues: list[list[int]] = [[i for i in range(total) if owners[i] == one] for one in range(num_targets)]
    left, begun, speeds = sizes.astype(float), {}, {}
    now, tick = 0.0, 5e-4
    while any(queues):
        heads = [queue[0] for queue in queues if queue and arrivals[queue[0]] <= now]
        for head in heads:
            begun.setdefault(head, now)
            left[head] -= tick * model.tokens_per_s(len(heads))
        now += tick
        for queue in queues:
            if queue and queue[0] in begun and left[queue[0]] <= 0:
                head = queue.pop(0)
                speeds[head] = sizes[head] / (now - begun[head])
    return float(np.mean([speeds[i] for i in range(total // 4, total)]))


def test_the_most_targets_are_found_by_halving():
    model = pool_model()
    least = model.tokens_per_s(11) * 1.0001
    most, runs = most_targets(model, [50], load=1.0, least_tokens_per_s=least, limit=500)
    assert most == 10
    assert {run.num_targets for run in runs} >= {10, 11}
    assert most_targets(model, [50], load=1.0, least_tokens_per_s=1e9, limit=500)[0] == 0
    assert most_targets(model, [50], load=1.0, least_tokens_per_s=0.0, limit=37)[0] == 37


def test_a_study_covers_every_delay_and_load_and_is_worse_further_away():
    request = PoolRequest(method="pearl", delays_s=(0.0, 5e-2), loads=(0.3, 1.0), min_speed_up=1.2, max_targets=64)
    scene = pool_scene(recording=make_synthetic(0.9, num_texts=2, num_tokens=16))
    study = make_pool_study(scene, request)
    assert [(point.delay_s, point.load) for point in study.points] == [(0.0, 0.3), (0.0, 1.0), (5e-2, 0.3), (5e-2, 1.0)]
    near, near_loaded, far, _ = study.points
    assert near.most_targets >= near_loaded.most_targets
    assert near.most_targets >= far.most_targets
    assert study == make_pool_study(scene, request)


def test_a_pool_without_a_network_or_with_impossible_numbers_is_refused():
    with pytest.raises(PlanError, match="delay of a network"):
        measure_service(toy_scene())
    with pytest.raises(PlanError, match="must rise from 1"):
        measure_service(pool_scene(), slowdowns=(2.0, 3.0))
    with pytest.raises(PlanError, match="load above 0"):
        simulate_pool(pool_model(), [10], num_targets=1, load=0.0)
    with pytest.raises(PlanError):
        PoolRequest(loads=())
