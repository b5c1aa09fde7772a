"""Profiles: what was measured comes out again, between the points too; what is wrong is refused."""

from __future__ import annotations

import json

import msgspec
import pytest

from card.errors import PlanError, SettingsError
from card.tools.planner.measuring import measure_profile
from card.tools.planner.method_plans import make_plan
from card.tools.planner.overheads import measure_overheads
from card.tools.planner.profile import (
    Overheads,
    PassTable,
    Setup,
    load_profile,
    save_profile,
    shipped_profiles,
)
from card.tools.planner.scenario import Scenario
from card.tools.planner.synthetic import make_synthetic
from tests.tools.planner.making import flat
from tests.toy import TableModel


def test_virtual_passes_take_what_is_known_of_them_else_what_the_engine_would_expect():
    setup = flat(1e-2, 1e-3).setups[0]
    assert setup.true_cost().seconds(5, 2, 160) == setup.pass_cost().seconds(5, 2, 160)
    assert setup.true_cost(3.0).seconds(5, 1, 0) == pytest.approx(3 * setup.pass_cost().seconds(5))
    other = msgspec.structs.replace(setup, taken=flat(2e-2, 1e-3).setups[0].cost)
    assert other.pass_cost() == setup.pass_cost()
    assert other.true_cost().seconds(1) == pytest.approx(2e-2)


def test_the_fastest_setup_that_has_the_cores_is_taken():
    fast, slow = flat(1e-2).setups[0].cost, flat(3e-2).setups[0].cost
    setups = tuple(Setup(threads=num, cost=cost) for num, cost in ((1, slow), (2, fast), (4, slow)))
    profile = msgspec.structs.replace(flat(1.0), setups=setups)
    assert profile.setup(1).threads == 1
    assert profile.setup(4).threads == 2  # more threads than are useful
    assert profile.max_threads == 4
    with pytest.raises(PlanError, match="made with 2, 4 threads, and 1 are left"):
        msgspec.structs.replace(profile, setups=setups[1:]).setup(1)


def test_who_is_told_how_many_threads_to_take_takes_them_though_fewer_were_faster():
    fast, slow = flat(1e-2).setups[0].cost, flat(3e-2).setups[0].cost
    setups = tuple(Setup(threads=num, cost=cost) for num, cost in ((2, fast), (4, slow)))
    profile = msgspec.structs.replace(flat(1.0), setups=setups)
    assert [profile.setup_of(num).threads for num in (2, 3, 4, 9)] == [2, 2, 4, 4]
    assert profile.setup_of(None).threads == profile.setup(None).threads == 2
    assert flat(1e-2).setup_of(3).threads is None  # a device has none to share out
    with pytest.raises(PlanError, match="made with 2, 4 threads, and 1 are left"):
        profile.setup_of(1)


def test_a_profile_survives_a_file(tmp_path):
    setup = Setup(threads=2, cost=PassTable(points=((1, 0.1), (8, 0.2))), taken=PassTable(points=((1, 0.2), (8, 0.3))))
    profile = msgspec.structs.replace(flat(1e-2), setups=(setup,), tokenizer="abc")
    save_profile(profile, tmp_path / "a.json")
    assert load_profile(tmp_path / "a.json") == profile


GOOD = {"points": [[1, 0.1], [2, 0.2]]}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "recording"}, "is no profile file: its kind is 'recording'"),
        ({"version": 9}, "version 9, this card reads version 1"),
        ({"setups": []}, "has no setups"),
        ({"source": ""}, "where its figures come from"),
        ({"measured": "yes"}, "broken profile"),
        ({"setups": [{"threads": 1, "cost": {"points": [[1, 0.1]]}}]}, "two or more"),
        ({"setups": [{"threads": 1, "cost": {"points": [[1, 0.1], [2, -1]]}}]}, "0 or more"),
        ({"setups": [{"threads": 1, "cost": GOOD, "taken": {"points": [[1, 0.1]]}}]}, "two or more"),
        ({"overheads": {"round_s": -1.0}}, "round_s of the overheads"),
        ({"overheads": {"beside_factor": 0.5}}, "1 or more"),
        ({"overheads": {"cold_s": 1e-3, "cold_later_s": 2e-3}}, "at most cold_s"),
        ({"overheads": {"by_writer": {"suffix": -1.0}}}, "by_writer.suffix of the overheads"),
    ],
)
def test_a_broken_profile_is_refused(tmp_path, change, complaint):
    data = json.loads(msgspec.json.encode(flat(1e-2))) | change
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=complaint):
        load_profile(tmp_path / "a.json")


def test_what_is_not_there_is_refused_with_what_there_is():
    with pytest.raises(PlanError, match=r"no profile nothing.*llama-3.1-70b-4xh100"):
        load_profile("nothing")


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_can_be_read_and_say_that_they_are_typed_in(name):
    profile = load_profile(name)
    assert not profile.measured
    assert "arXiv:" in profile.source


def test_the_workers_own_time_is_found_on_any_model():
    found = measure_overheads(TableModel(1, vocab_size=64, max_model_len=512))
    for name in ("round_s", "step_s", "drafted_s"):
        assert 0 < getattr(found, name) < 1
    assert 0 < found.commit_s + found.commit_row_s < 1
    assert {"suffix", "lookup", "recycling", "lookahead", "phrases"} <= found.by_writer.keys()
    assert all(0 <= seconds < 1 for seconds in found.by_writer.values())


def test_a_round_takes_what_its_policy_its_writers_and_its_candidates_take():
    around = Overheads(
        round_s=1.0,
        request_s=0.5,
        drafted_s=0.25,
        drafted_request_s=0.125,
        tuned_s=8.0,
        tuned_request_s=4.0,
        tuned_drafted_s=32.0,
        tuned_drafted_request_s=16.0,
        by_writer={"suffix": 0.1, "lookup": 0.2},
        writer_s=0.3,
    )
    assert around.of_round() == 1.0
    assert around.of_round(num_requests=3) == 1.0 + 2 * 0.5
    assert around.of_round(has_drafted=True, num_requests=3, num_verifying=2) == 2.0 + 0.25 + 2 * 0.125
    assert around.of_round(is_tuned=True, num_requests=3) == 2.0 + 8.0 + 2 * 4.0
    assert around.of_round(is_tuned=True, has_drafted=True, num_requests=3) == 2.25 + 8.0 + 2 * 4.0 + 32.0 + 2 * 16.0
    assert around.of_proposal("lookup", 16) == pytest.approx(0.2)
    assert 0 < around.of_proposal("lookup", 0) < around.of_proposal("lookup", 8) < 0.2
    assert around.of_proposal("store", 16) == pytest.approx(0.3), "one of which nothing is known"


def test_a_round_takes_the_longer_for_turning_its_tokens_into_text(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("card.tools.planner.overheads.time.perf_counter", lambda: now[0])

    class SlowText:
        def __init__(self, *_):
            pass

        def take(self, token_ids, *, is_end):
            now[0] += 0.25 * len(token_ids)

    monkeypatch.setattr("card.tools.planner.overheads.TextStream", SlowText)
    model = TableModel(1, vocab_size=64, max_model_len=512)
    assert measure_overheads(model).round_s == 0.0
    assert measure_overheads(model, tokenizer=object()).round_s == pytest.approx(0.25)


@pytest.mark.parametrize("threads", [(2, 1), (1, 1), (0, 1), (1, 99999)])
def test_a_measurement_refuses_threads_that_do_not_rise(threads):
    with pytest.raises(PlanError, match="rising order"):
        measure_profile("toy", threads=threads)
    assert issubclass(PlanError, Exception) and not issubclass(PlanError, SettingsError)


def test_a_profile_leaves_a_thread_for_a_drafter_so_that_a_plan_with_defaults_has_every_method_of_a_pair(monkeypatch):
    monkeypatch.setattr("card.tools.planner.measuring.default_threads", lambda: 2)
    monkeypatch.setattr("card.tools.planner.measuring.MEASURING_LIMIT_S", 0.2)
    target, draft = (measure_profile(name, dtype="float32") for name in ("demo-target", "demo-draft"))
    assert [setup.threads for setup in target.setups] == [1, 2]
    report = make_plan(Scenario(target=target, draft=draft, recording=make_synthetic(0.7)), searches=False)
    assert {"card", "pearl", "ssd", "specbranch", "sps", "vanilla"} <= {plan.method for plan in report.methods}
