"""Speculation on models with experts on the planner's clock: it costs no more than trials, and pays where it can."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import msgspec
import pytest

from card.engine.policy.modes import TRIAL_SHARE
from card.machine.expert_cost import ExpertCounts
from card.tools.planner.profile import PassTable, Profile, Setup, load_profile, save_profile
from card.tools.planner.scenario import Scenario
from card.tools.planner.simulate import Simulator, VirtualRun
from card.tools.planner.synthetic import make_synthetic
from tests.cells import crossed
from tests.tools.planner.making import flat, toy_scenario

SIZES = (1, 2, 4, 8, 16, 32, 64)
# Layers with experts, experts of one, those that a row chooses, and their share of the weights that a row reads.
MODELS = {
    "Qwen3-30B-A3B": (48, 128, 8, 0.60),
    "Qwen3.6-35B-A3B": (40, 256, 8, 0.35),
    "gpt-oss-20b": (24, 32, 4, 0.50),
    "LFM2-8B-A1B": (22, 32, 4, 0.62),
}
ACCEPTANCES, AT_ONCE = (0.3, 0.6, 0.8), (1, 8)
PASS_S = 0.04  # of one token


def passes(name: str, *, alike: float = 0.0) -> PassTable:
    """Return passes bound by reading weights; a row chooses like an earlier one with chance ``alike``, else evenly."""
    num_layers, num_experts, per_row, share = MODELS[name]
    new = (1 - alike) * per_row / num_experts
    read = [num_experts - (num_experts - per_row) * (1 - new) ** (size - 1) for size in SIZES]
    counted = tuple((size, round(num_layers * one)) for size, one in zip(SIZES, read, strict=True))
    counts = ExpertCounts(num_experts=num_layers * num_experts, per_row=num_layers * per_row, counted=counted)
    seconds = [PASS_S * (1 - share + share * one / per_row) for one in read]
    return PassTable(points=tuple(zip(SIZES, seconds, strict=True)), per_context_row_s=1e-7, experts=counts)


def target(measured: PassTable, taken: PassTable | None = None) -> Profile:
    return msgspec.structs.replace(flat(1.0), setups=(Setup(threads=2, cost=measured, taken=taken),))


def simulator(profile: Profile, acceptance: float, at_once: int) -> Simulator:
    draft = flat(0.03 * PASS_S, 1e-4, threads=(2,))
    recording = make_synthetic(acceptance, num_texts=8, num_tokens=128)
    return Simulator(Scenario(target=profile, draft=draft, recording=recording, concurrency=at_once, cores=2))


@cache
def runs(name: str, acceptance: float, at_once: int) -> tuple[VirtualRun, VirtualRun]:
    """Return plain decoding and the tuned policy."""
    simulated = simulator(target(passes(name)), acceptance, at_once)
    return simulated.run("vanilla"), simulated.run("card")


def speed_up(name: str, acceptance: float, at_once: int) -> float:
    plain, tuned = runs(name, acceptance, at_once)
    return tuned.tokens_per_s / plain.tokens_per_s


def test_the_table_of_passes_is_that_of_independent_choices() -> None:
    known = {"Qwen3-30B-A3B": (1.56, 2.58, 4.27), "Qwen3.6-35B-A3B": (1.33, 1.97, 3.13)}
    for name, ratios in known.items():
        cost = passes(name).pass_cost()
        found = [cost.seconds(size) / cost.seconds(1) for size in (2, 4, 8)]
        assert found == pytest.approx(ratios, rel=0.015)


@pytest.mark.parametrize(("name", "acceptance", "at_once"), crossed(tuple(MODELS), ACCEPTANCES, AT_ONCE))
def test_speculation_on_experts_costs_no_more_than_its_trials(name: str, acceptance: float, at_once: int) -> None:
    assert speed_up(name, acceptance, at_once) > 1 - TRIAL_SHARE


@pytest.mark.parametrize(("name", "at_once"), list(itertools.product(MODELS, AT_ONCE)))
def test_good_drafts_pay_on_experts(name: str, at_once: int) -> None:
    assert speed_up(name, 0.8, at_once) > 1.14
    plain, tuned = runs(name, 0.8, at_once)
    assert tuned.total.target_passes < 0.65 * plain.total.target_passes
    assert tuned.total.accepted_tokens > 0.4 * tuned.num_tokens


@pytest.mark.parametrize("name", MODELS)
def test_fair_drafts_pay_one_request_on_experts(name: str) -> None:
    assert speed_up(name, 0.6, 1) > 1.05


@pytest.mark.parametrize("name", MODELS)
def test_of_rows_that_bring_experts_few_are_verified_and_those_are_mostly_accepted(name: str) -> None:
    _, tuned = runs(name, 0.6, 1)
    assert tuned.total.accepted_tokens > 0.7 * tuned.total.verified_tokens
    dense = flat(PASS_S, 1e-4, threads=(2,))
    free = simulator(dense, 0.6, 1).run("card").total
    assert free.verified_tokens / free.target_passes > 2 * tuned.total.verified_tokens / tuned.total.target_passes


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_choose_alike_in_real_texts_are_found_to_be_cheaper(name: str) -> None:
    measured, taken = passes(name), passes(name, alike=0.5)
    learnt = simulator(target(measured, taken), 0.8, 1).run("card")
    known = simulator(target(taken), 0.8, 1).run("card")
    assert learnt.tokens_per_s > 0.95 * known.tokens_per_s
    assert learnt.tokens_per_s > 1.05 * runs(name, 0.8, 1)[1].tokens_per_s


def test_texts_on_experts_are_the_recorded_ones_whatever_a_pass_reads() -> None:
    told, other = (passes("gpt-oss-20b", alike=alike) for alike in (0.0, 0.9))
    for profile in (target(told), target(told, other), target(other, told)):
        scenario = toy_scenario(target=profile, draft=flat(1e-3, threads=(1, 2)), cores=2)
        run = Simulator(scenario).run("card")  # which raises if a text comes out otherwise
        assert run.num_tokens == sum(len(text.token_ids) - 1 for text in scenario.recording.texts)


def test_a_profile_keeps_the_experts_that_were_counted(tmp_path: Path) -> None:
    profile = target(passes("gpt-oss-20b"))
    save_profile(profile, tmp_path / "a.json")
    kept = load_profile(tmp_path / "a.json")
    assert kept == profile
    cost = kept.setups[0].pass_cost()
    assert cost.experts is not None and dict(cost.experts.counted)[1] == 24 * 4
    assert cost.seconds(4) == profile.setups[0].pass_cost().seconds(4)
