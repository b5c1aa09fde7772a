"""Methods in virtual time: the recorded text, times that can be computed by hand, the same ones each time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import SamplingParams
from card.config.registry import methods
from card.errors import PlanError, SettingsError
from card.tools.planner.profile import Overheads, PassTable, Profile
from card.tools.planner.recording import Recording
from card.tools.planner.scenario import (
    Scenario,
    Setups,
    build_stage,
    make_request,
    plan_method,
    replayed_texts,
    setups_of,
)
from card.tools.planner.simulate import Simulator
from card.tools.planner.synthetic import make_synthetic
from tests.decoding import decode, inline
from tests.examples import settings
from tests.tools.planner.making import NO_OVERHEADS, flat, toy_models, toy_recording, toy_scenario
from tests.tools.planner.sharing import run_shared

RECORDINGS = {
    "greedy": toy_recording(),
    "sampled": toy_recording(temperature=1.0),
    "sampled, uncoupled": toy_recording(temperature=0.7, coupled_noise=False),
}
ALWAYS_RIGHT = make_synthetic(1.0, num_texts=2, num_tokens=30)


def decoded(scenario: Scenario, method: str, changes: dict[str, object]) -> list[tuple[int, ...]]:
    """Return the texts of an engine in virtual time, in the recording's own token ids."""
    plan = plan_method(scenario, method, changes)
    texts = replayed_texts(scenario, plan)
    stage = build_stage(scenario, plan, texts)
    answers: dict[int, list[int]] = {}
    for idx in range(len(texts.prompts)):
        stage.engine.add(stage.engine.check(make_request(stage, scenario, texts, idx, idx)))
        answers[idx] = []
    while stage.engine.has_work:
        for update in stage.engine.step():
            assert update.error is None
            answers[update.request_id] += update.token_ids
    return [tuple(int(texts.original_ids[i]) for i in answers[idx]) for idx in sorted(answers)]


def planned_setups(scenario: Scenario, method: str, changes: dict[str, object]) -> Setups:
    return setups_of(scenario, plan_method(scenario, method, changes))


def recorded(recording: Recording) -> list[tuple[int, ...]]:
    return [text.token_ids for text in recording.texts]


@pytest.mark.parametrize("kind", RECORDINGS)
@pytest.mark.parametrize(
    "method", [name for name, one in methods().items() if not (one.needs_training or one.selection)]
)
def test_every_method_writes_the_recorded_texts(method, kind):
    recording = RECORDINGS[kind]
    assert decoded(toy_scenario(recording=recording), method, {}) == recorded(recording)


@given(
    target_s=st.floats(1e-4, 0.1),
    draft_s=st.floats(0, 0.1),
    network_s=st.none() | st.floats(0, 0.1),
    has_draft_here=st.booleans(),
    concurrency=st.integers(1, 3),
    width=st.integers(1, 6),
)
@settings(max_examples=12, deadline=None)
def test_the_text_does_not_depend_on_any_latency(target_s, draft_s, network_s, has_draft_here, concurrency, width):
    recording = RECORDINGS["greedy"]
    scenario = toy_scenario(
        recording=recording,
        target=flat(target_s, threads=(1, 2)),
        draft=flat(draft_s, threads=(1, 2)),
        network_s=network_s,
        has_draft_here=has_draft_here,
        concurrency=concurrency,
    )
    assert decoded(scenario, "card", {"beam_width": width}) == recorded(recording)


@pytest.mark.parametrize("method", ["card", "ssd", "ouroboros"])
def test_the_same_scene_takes_the_same_time(method):
    one, other = (Simulator(toy_scenario()).run(method) for _ in range(2))
    assert one.stats == other.stats


def test_plain_decoding_takes_the_sum_of_its_passes_and_rounds():
    overheads = Overheads(round_s=5e-4)
    scenario = toy_scenario(target=flat(1e-2, overheads=overheads), recording=ALWAYS_RIGHT)
    run = Simulator(scenario).run("vanilla")
    num_passes = sum(len(text.token_ids) - 1 for text in ALWAYS_RIGHT.texts)
    assert run.total.target_passes == run.num_tokens == num_passes
    assert run.total.target_busy_s == pytest.approx(num_passes * 1e-2)
    assert run.decode_s == pytest.approx(num_passes * 1.05e-2)
    assert run.overhead_s == pytest.approx(num_passes * 5e-4)


def test_a_round_pays_for_verifying_drafts_where_there_are_some():
    def overhead_s(method: str, settings: dict[str, object], draft_s: float) -> float:
        target = flat(1e-2, threads=(1, 2), overheads=replace_overheads(drafted_s=4e-3))
        scenario = toy_scenario(target=target, draft=flat(draft_s, threads=(1, 2)), recording=ALWAYS_RIGHT)
        run = Simulator(scenario).run(method, settings)
        return run.overhead_s / run.total.target_passes

    assert overhead_s("card", {"schedule": "beside"}, 1e-3) == pytest.approx(4e-3, rel=0.25)
    assert overhead_s("card", {"schedule": "turns"}, 1e-3) == pytest.approx(4e-3, rel=0.25)
    assert overhead_s("card", {"schedule": "turns"}, 1.0) < 1e-3, "so slow a drafter rests"
    assert overhead_s("vanilla", {}, 1e-3) == pytest.approx(0.0, abs=1e-9)


def test_each_layer_that_a_tuned_policy_is_asked_for_takes_longer():
    def seconds(settings: dict[str, object], layer_s: float) -> tuple[float, int]:
        draft = flat(1e-4, threads=(1, 2), overheads=replace_overheads(tuned_step_s=layer_s))
        target = flat(1e-2, threads=(1, 2), overheads=NO_OVERHEADS)
        scenario = toy_scenario(target=target, draft=draft, recording=ALWAYS_RIGHT)
        run = Simulator(scenario).run("card", {"schedule": "turns", "writers": ("beam",), **settings})
        return run.decode_s, run.total.drafter_passes

    (free_s, _), (dear_s, num_layers) = seconds({}, 0.0), seconds({}, 1e-5)
    assert dear_s - free_s == pytest.approx(num_layers * 1e-5, rel=0.3)
    assert seconds({"policy": "fixed"}, 0.0) == seconds({"policy": "fixed"}, 1e-5), "who obeys is not asked"


def test_a_free_drafter_that_is_always_right_gives_the_speed_computed_by_hand():
    scenario = toy_scenario(
        target=flat(1e-2, 1e-3, overheads=replace_overheads(round_s=1e-3)), draft=flat(0.0), recording=ALWAYS_RIGHT
    )
    run = Simulator(scenario).run("sps", {"num_speculative_tokens": 4, "placement": "inline"})
    seconds = 0.0
    for text in ALWAYS_RIGHT.texts:
        left = len(text.token_ids) - 1  # the pass that reads the prompt gives the first one
        while left:
            drafted = min(4, left - 1)  # the last token of all is the target's own
            seconds += 1e-2 + drafted * 1e-3 + 1e-3
            left -= drafted + 1
    assert run.decode_s == pytest.approx(seconds)
    assert run.tokens_per_s == pytest.approx(run.num_tokens / seconds)


def test_in_turns_each_drafted_token_takes_a_pass_of_the_drafter():
    scenario = toy_scenario(target=flat(1e-2), draft=flat(2e-3), recording=ALWAYS_RIGHT)
    run = Simulator(scenario).run("sps", {"num_speculative_tokens": 4, "placement": "inline"})
    drafted = run.num_tokens - run.total.target_passes
    drafted += len(ALWAYS_RIGHT.texts)  # the last token of each text is drafted, too, though only the target gives it
    assert run.total.waited_s == pytest.approx(2e-3 * drafted)
    assert run.decode_s == pytest.approx(1e-2 * run.total.target_passes + 2e-3 * drafted)


def test_in_turns_the_first_pass_of_each_turn_finds_its_caches_cold():
    warm, cold = (
        Simulator(toy_scenario(target=flat(1e-2), draft=flat(2e-3, overheads=overheads), recording=ALWAYS_RIGHT)).run(
            "sps", {"num_speculative_tokens": 4, "placement": "inline"}
        )
        for overheads in (NO_OVERHEADS, replace_overheads(cold_s=5e-3))
    )
    assert cold.total.target_passes == warm.total.target_passes
    assert cold.total.waited_s - warm.total.waited_s == pytest.approx(5e-3 * warm.total.target_passes)


@pytest.mark.parametrize(("length", "taken_s"), [(1, 3e-3), (4, 5e-3)])
def test_a_turn_of_a_single_pass_takes_what_is_cold_in_the_first_pass_alone(length, taken_s):
    warm, cold = (
        Simulator(toy_scenario(target=flat(1e-2), draft=flat(2e-3, overheads=overheads), recording=ALWAYS_RIGHT)).run(
            "sps", {"num_speculative_tokens": length, "placement": "inline"}
        )
        for overheads in (NO_OVERHEADS, replace_overheads(cold_s=5e-3, cold_later_s=2e-3))
    )
    assert cold.total.waited_s - warm.total.waited_s == pytest.approx(taken_s * warm.total.target_passes, rel=0.05)


def test_a_drafter_beside_costs_the_target_no_time_while_it_keeps_up():
    """Rounds of 4 drafts of 2 ms beside a pass of 10 ms: the drafter is never waited for after the first round."""
    scenario = toy_scenario(target=flat(1e-2), draft=flat(2e-3), recording=ALWAYS_RIGHT)
    run = Simulator(scenario).run("pearl", {"num_speculative_tokens": 5})
    assert run.total.mean_acceptance_length == pytest.approx(5.0, rel=0.2)
    assert run.total.waited_s <= 0.1 * run.decode_s
    assert run.decode_s == pytest.approx(1e-2 * run.total.target_passes, rel=0.1)


@pytest.mark.parametrize("method", ["sps", "pearl", "ssd", "specbranch", "card"])
def test_a_longer_way_to_the_drafter_never_speeds_up(method):
    changes = {} if method != "card" else {"policy": "fixed"}
    speeds = [
        Simulator(toy_scenario(network_s=delay_s)).run(method, {"num_speculative_tokens": 4, **changes}).tokens_per_s
        for delay_s in (0.0, 5e-3, 2e-2, 8e-2)
    ]
    assert speeds == sorted(speeds, reverse=True)


def test_a_tuned_method_never_falls_far_below_plain_decoding():
    scenario = toy_scenario(draft=flat(5e-2, threads=(1, 2)), recording=toy_recording(agreement=0.1, num_tokens=60))
    simulator = Simulator(scenario)
    assert simulator.run("card").tokens_per_s > 0.85 * simulator.run("vanilla").tokens_per_s


def test_requests_at_once_share_the_passes():
    one, three = (Simulator(toy_scenario(concurrency=num)).run("vanilla") for num in (1, 3))
    assert three.tokens_per_s > 2 * one.tokens_per_s


def test_a_round_of_several_requests_pays_once_and_a_little_for_each_further_one():
    overheads = replace_overheads(round_s=1e-3, request_s=2e-4)
    recording = make_synthetic(1.0, num_texts=3, num_tokens=20)
    scenario = toy_scenario(target=flat(1e-2, overheads=overheads), recording=recording, concurrency=3)
    seconds = Simulator(scenario).run("vanilla").stats[1].decode_s  # of the one that is never alone
    least_s, most_s = (19 * (1e-2 + 1e-3 + num_further * 2e-4) for num_further in (1, 2))
    assert least_s - 1e-9 <= seconds <= most_s + 1e-9


def test_one_target_of_many_is_served_as_if_it_had_the_drafter_alone():
    simulator = Simulator(toy_scenario(network_s=3e-3))
    for method in ("card", "ssd"):
        (shared,) = run_shared(simulator, method, num_targets=1)
        assert shared.stats == simulator.run(method).stats


def test_targets_that_share_a_drafter_are_slower_and_write_the_same():
    """That the texts are the recorded ones is checked by the run itself."""
    simulator = Simulator(toy_scenario(network_s=1e-3, draft=flat(3e-3, 1e-3)))
    alone = run_shared(simulator, "pearl", num_targets=1)
    together = run_shared(simulator, "pearl", num_targets=3)
    assert together == run_shared(simulator, "pearl", num_targets=3)
    assert all(run.tokens_per_s < alone[0].tokens_per_s for run in together)


def test_a_scene_refuses_what_is_not_of_one_tokenizer():
    with pytest.raises(PlanError, match="target and recording are not of one tokenizer"):
        toy_scenario(target=flat(1e-2, tokenizer="a"), recording=toy_recording(tokenizer="b"))
    with pytest.raises(PlanError, match="target and draft are not of one tokenizer"):
        toy_scenario(target=flat(1e-2, tokenizer="a"), draft=flat(1e-3, tokenizer="c"))
    toy_scenario(target=flat(1e-2, tokenizer="a"), recording=toy_recording(tokenizer="a"))


def test_a_plan_refuses_what_it_cannot_follow():
    scenario = toy_scenario()
    with pytest.raises(PlanError, match="cannot follow device"):
        plan_method(scenario, "card", {"device": "cuda"})
    with pytest.raises(PlanError, match="profile of a draft model"):
        plan_method(replace(scenario, draft=None), "card", {})
    with pytest.raises(PlanError, match="32 candidates"):
        Simulator(scenario).run("card", {"branch": 33})
    with pytest.raises(SettingsError, match="unknown setting"):
        plan_method(scenario, "card", {"colour": 1})
    with pytest.raises(PlanError, match="1 cores leave none"):
        plan_method(replace(scenario, cores=1), "pearl", {})


def test_a_drafter_is_beside_a_target_that_does_not_miss_its_core():
    for profile, placements in (
        (flat(1e-2, threads=(1, 2)), {"beside": "process", "turns": "inline"}),
        (replace_setups(flat(1e-2, threads=(1, 2))), {"turns": "inline"}),
        (flat(1e-2, threads=(2,)), {"turns": "inline"}),  # nobody knows
        (flat(1e-2), {"beside": "thread"}),
    ):
        assert plan_method(toy_scenario(target=profile), "card", {}).placements == placements


def test_the_target_has_fewer_cores_beside_a_drafter():
    target = replace_setups(flat(1e-2, threads=(1, 2)))
    scenario = toy_scenario(target=target)
    plan = plan_method(scenario, "card", {"schedule": "beside"})
    assert (setups_of(scenario, plan).alone.threads, setups_of(scenario, plan).beside.threads) == (2, 1)
    assert planned_setups(scenario, "vanilla", {}).alone.threads == 2
    assert planned_setups(replace(scenario, network_s=0.0), "card", {}).beside.threads == 2


@pytest.mark.parametrize(
    ("method", "changes", "pass_s"),
    [
        ("vanilla", {}, 5e-3),
        ("sps", {}, 5e-3),
        ("pearl", {}, 1.5e-2),
        ("card", {"schedule": "beside", "policy": "fixed"}, 1.5e-2),
        ("card", {"schedule": "turns"}, 5e-3),
    ],
)
def test_passes_take_what_they_do_where_the_method_runs_them(method, changes, pass_s):
    """5 ms with two cores; 10 ms with one, and half as much again while a drafter runs on the other."""
    overheads = replace_overheads(beside_factor=1.5)
    scenario = toy_scenario(
        target=replace_setups(flat(1e-2, threads=(1, 2), overheads=overheads)),
        draft=flat(1e-3, threads=(1, 2), overheads=overheads),
    )
    run = Simulator(scenario).run(method, changes)
    assert run.total.target_busy_s == pytest.approx(pass_s * run.total.target_passes)
    if run.where != "none":
        drafter_s = 1.5e-3 if run.where == "process" else 1e-3
        assert run.total.drafter_busy_s == pytest.approx(drafter_s * run.total.drafter_passes)


def test_what_a_drafter_does_around_its_passes_takes_longer_beside_a_target_too():
    slowed, alone = (
        Simulator(
            toy_scenario(
                target=flat(1e-2, threads=(1, 2)),
                draft=flat(0.0, threads=(1, 2), overheads=replace_overheads(step_s=1e-3, beside_factor=factor)),
            )
        ).run("pearl", {"num_speculative_tokens": 5})
        for factor in (2.0, 1.0)
    )
    assert slowed.total.drafter_busy_s == pytest.approx(2e-3 * slowed.total.drafter_passes)
    assert alone.total.drafter_busy_s == pytest.approx(1e-3 * alone.total.drafter_passes)


def test_the_drafter_takes_as_many_threads_as_the_target_that_it_takes_turns_with():
    fast_alone = msgspec.structs.replace(flat(1e-3).setups[0], threads=1)
    draft = msgspec.structs.replace(flat(5e-3, threads=(1, 2)), setups=(fast_alone, flat(5e-3, threads=(2,)).setups[0]))
    scenario = toy_scenario(target=replace_setups(flat(1e-2, threads=(1, 2))), draft=draft)
    assert planned_setups(scenario, "sps", {}).own_draft.threads == 2
    assert planned_setups(scenario, "sps", {"threads": 1}).own_draft.threads == 1
    assert planned_setups(scenario, "sps", {"threads": 1}).alone.threads == 1
    assert planned_setups(scenario, "pearl", {"threads": 2}).beside.threads == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["sps", "suffix", "lookup"])
def test_what_is_drafted_and_accepted_is_what_the_models_themselves_would(method, temperature):
    """Methods whose candidates depend on the recorded text alone: each verification is that of the real pair."""
    recording = toy_recording(temperature=temperature)
    changes = {"policy": "fixed", **({"placement": "inline"} if method == "sps" else {})}
    run = Simulator(toy_scenario(recording=recording)).run(method, changes)
    target, draft = toy_models()
    for text, virtual in zip(recording.texts, run.stats, strict=True):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=len(text.token_ids))
        link = inline(draft) if method == "sps" else None
        token_ids, _, real = decode(target, link, method=method, params=params, prompt=text.prompt_ids)
        assert tuple(token_ids) == text.token_ids
        assert (virtual.target_passes, virtual.accepted_tokens) == (real.target_passes, real.accepted_tokens)


def replace_overheads(**changes: float) -> Overheads:
    values = {name: getattr(NO_OVERHEADS, name) for name in NO_OVERHEADS.__struct_fields__}
    return Overheads(**{**values, **changes})


def replace_setups(profile: Profile) -> Profile:
    """Return the profile with its setup of two threads twice as fast."""
    slow, fast = profile.setups
    halved = PassTable(points=tuple((x, y / 2) for x, y in fast.cost.points))
    return msgspec.structs.replace(profile, setups=(slow, msgspec.structs.replace(fast, cost=halved)))
