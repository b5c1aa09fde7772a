"""Plans: all methods compared, settings that are better found, and what the commands print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from card.cli.main import cli
from card.config.registry import methods
from card.errors import CardError, PlanError, SettingsError
from card.machine.expert_cost import ExpertCounts
from card.tools.planner import command
from card.tools.planner.method_plans import KNOBS, make_plan
from card.tools.planner.profile import PassTable, Setup, load_profile, save_profile
from card.tools.planner.recording import load_recording, save_recording
from card.tools.planner.simulate import Simulator
from card.tools.planner.synthetic import make_synthetic
from tests.tools.planner.making import flat, toy_recording, toy_scenario

SHIPPED = ["--target", "llama-3.1-70b-4xh100", "--draft", "llama-3.2-1b-h100"]

ANY_DRAFT = {name for name, method in methods().items() if not (method.needs_training or method.selection)}


def run(*arguments: str) -> str:
    """Return what the command prints."""
    result = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_plan_holds_every_method_fastest_first():
    report = make_plan(toy_scenario(), searches=False)
    assert {plan.method for plan in report.methods} == ANY_DRAFT
    assert "does not say what pard drafts" in report.left_out["pard"]
    speeds = [plan.best_tokens_per_s for plan in report.methods]
    assert speeds == sorted(speeds, reverse=True)
    plain = next(plan for plan in report.methods if plan.method == "vanilla")
    assert plain.speed_up == 1.0
    for plan in report.methods:
        shares = plan.shares
        assert shares["target"] + shares["waiting"] + shares["overhead"] == pytest.approx(1.0)


def test_shares_of_time_are_shares_with_several_texts_at_once():
    for plan in make_plan(toy_scenario(concurrency=4), searches=False).methods:
        shares = plan.shares
        assert shares["target"] + shares["waiting"] + shares["overhead"] == pytest.approx(1.0)
        assert 0.0 <= plan.hit_rate <= 1.0 and all(0.0 <= share <= 1.0 for share in shares.values()), plan


def test_every_exact_method_has_knobs_to_search_and_another_one_is_refused():
    others = {name for name, method in methods().items() if not method.is_exact}
    assert set(KNOBS) == set(methods()) - others and others
    for name in others:
        with pytest.raises(PlanError, match=f"{name} writes another text"):
            make_plan(toy_scenario(), [name])


def test_without_a_draft_profile_methods_that_need_one_are_left_out_with_the_reason():
    report = make_plan(replace(toy_scenario(), draft=None), searches=False)
    assert {plan.method for plan in report.methods} == {"vanilla", "lookup", "suffix", "recycling", "lookahead"}
    assert "profile of a draft model" in report.left_out["card"]
    with pytest.raises(PlanError, match="profile of a draft model"):
        make_plan(replace(toy_scenario(), draft=None), ["sps"])
    with pytest.raises(SettingsError, match="unknown method"):
        make_plan(toy_scenario(), ["magic"])


def test_the_search_finds_the_length_that_is_best_by_trying_all():
    """Drafts that are free and nearly always right: long ones are better than the 6 of the settings."""
    recording = make_synthetic(0.97, num_texts=2, num_tokens=60)
    scenario = toy_scenario(target=flat(1e-2, 1e-4), draft=flat(1e-4), recording=recording)
    (plan,) = make_plan(scenario, ["sps"]).methods
    simulator = Simulator(scenario)
    speeds = {num: simulator.run("sps", {"num_speculative_tokens": num}).tokens_per_s for num in (3, 6, 12, 24, 32)}
    best = max(speeds, key=lambda num: speeds[num])
    assert plan.best_settings == {"num_speculative_tokens": best}
    assert plan.best_tokens_per_s == speeds[best]
    (knob,) = plan.sensitivity
    assert (knob.knob, knob.value) == ("num_speculative_tokens", best)
    halved = simulator.run("sps", {"num_speculative_tokens": best // 2})
    assert knob.halved == pytest.approx(halved.tokens_per_s / speeds[best])


def test_settings_as_shipped_stay_where_nothing_is_better():
    scenario = toy_scenario(target=flat(1e-2, 1e-2), recording=toy_recording(agreement=0.3))
    (plan,) = make_plan(scenario, ["vanilla"]).methods
    assert plan.best_settings == {} and plan.sensitivity == ()
    assert plan.best_tokens_per_s == plan.tokens_per_s


def test_the_command_prints_a_plan_of_shipped_profiles_as_json():
    report = json.loads(run(*SHIPPED, "--synthetic", "0.9", "--methods", "vanilla,sps,card", "--no-search", "--json"))
    speed_up = {plan["method"]: plan["speed_up"] for plan in report["methods"]}
    assert not report["is_measured"]
    assert 1.0 == speed_up["vanilla"] < speed_up["sps"] < speed_up["card"] <= 7.0  # no faster than its drafter


def test_the_command_prints_tables_for_files(tmp_path: Path):
    scenario = toy_scenario()
    for name, profile in (("t", scenario.target), ("d", scenario.draft)):
        save_profile(profile, tmp_path / name)
    save_recording(scenario.recording, tmp_path / "r")
    files = ("--target", str(tmp_path / "t"), "--draft", str(tmp_path / "d"), "--recording", str(tmp_path / "r"))
    output = run(*files, "--methods", "vanilla,sps")
    assert "typed-in profiles" in output and "num_speculative_tokens" in output


def test_the_command_studies_a_pool(tmp_path: Path):
    save_recording(make_synthetic(0.9, num_texts=2, num_tokens=20), tmp_path / "r")
    files = (*SHIPPED, "--recording", str(tmp_path / "r"))
    arguments = ("--pool", "--method", "pearl", "--delays-ms", "1", "--loads", "0.5", "--max-targets", "64")
    (point,) = json.loads(run(*files, *arguments, "--json"))["points"]
    assert 1 <= point["most_targets"] <= 64
    assert "served" in run(*files, *arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (SHIPPED, "either --recording"),
        ([*SHIPPED, "--synthetic", "2"], "from 0 to 1"),
        (["--target", "nothing", "--synthetic", "0.5"], "no profile nothing"),
        ([*SHIPPED, "--recording", "nothing"], "cannot read the recording"),
        ([*SHIPPED, "--synthetic", "0.5", "--concurrency", "0"], "concurrency"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, complaint):
    with pytest.raises(CardError, match=complaint):
        run(*arguments)


def test_a_profile_of_a_model_with_experts_says_how_many_passes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counts = ExpertCounts(num_experts=6144, per_row=384, counted=((1, 384), (8, 2478)))
    table = PassTable(points=((1, 0.1), (8, 0.4)), experts=counts)
    made = msgspec.structs.replace(flat(0.1), setups=(Setup(threads=1, cost=table),))
    monkeypatch.setattr(command, "measure_profile", lambda *_, **__: made)
    ran = CliRunner().invoke(cli, ["profile", "some-model", "--out", str(tmp_path / "p")])
    said = "experts read, of 6,144 in all layers, by tokens of a pass: 384 by 1, 2,478 by 8"
    assert (ran.exit_code, said in ran.output.splitlines()) == (0, True)
    assert load_profile(tmp_path / "p") == made


def test_the_demo_pair_is_profiled_and_recorded(tmp_path: Path):
    runner = CliRunner()
    assert runner.invoke(cli, ["profile", "demo-draft", "--out", str(tmp_path / "p"), "--threads", "1"]).exit_code == 0
    recorded = ["--out", str(tmp_path / "r"), "--limit", "2", "--max-tokens", "8"]
    assert runner.invoke(cli, ["record", *recorded]).exit_code == 0
    profile, recording = load_profile(tmp_path / "p"), load_recording(tmp_path / "r")
    assert profile.measured and profile.setups[0].threads == 1
    assert len(recording.texts) == 2
    assert recording.agreement() > 0.3
    assert profile.tokenizer == recording.tokenizer
