"""Figures are sums over samples, medians over repeats, and made of what is complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from card.engine.metrics import RequestStats
from card.tools.bench.records import Run, Sample
from card.tools.bench.summary import (
    Percentiles,
    Share,
    Spread,
    complete_samples,
    costs_of,
    decode_rate,
    ratio,
    summarise,
)
from tests.tools.bench.bench_files import make_run

PAIR, WORKLOAD = "demo-90M", "gsm8k"


def timed(sample: Sample, decode_s: float) -> Sample:
    """Return the sample with all tokens but the first after so many seconds."""
    times = ((0.5, 1), (0.5 + decode_s, sample.new_tokens))
    return replace(sample, prefill_s=0.5, decode_s=decode_s, wall_s=0.5 + decode_s, token_times=times)


def run_with(seconds: dict[str, list[float]]) -> Run:
    """Return a run of two prompts whose rows took so many seconds a prompt in each repeat."""
    run = make_run(num_prompts=2, repeats=3)
    samples = [timed(one, seconds[one.row][one.repeat]) for one in run.samples if one.row in seconds]
    return replace(run, rows=tuple(row for row in run.rows if row.name in seconds), samples=tuple(samples))


SECONDS = {"vanilla-all-cores": [4.0, 5.0, 10.0], "card": [2.0, 5.0, 4.0]}


def test_speeds_are_medians_over_repeats_and_leave_the_first_pass_out() -> None:
    plain, card = summarise(run_with(SECONDS))
    assert plain.tokens_per_s == Spread(39 / 5, 39 / 10, 39 / 4, (39 / 4, 39 / 5, 39 / 10))
    assert card.wall_tokens_per_s.runs[0] == pytest.approx(40 / 2.5)
    assert (card.num_prompts, card.num_repeats, card.num_tokens) == (2, 3, 80)


def test_a_speedup_is_the_median_of_the_ratios_within_a_repeat_and_losses_show() -> None:
    run = run_with(SECONDS)
    plain, card = summarise(run)
    assert card.speedup is not None and card.speedup.runs == (2.0, 1.0, 2.5) and card.speedup.median == 2.0
    assert plain.speedup is not None and plain.speedup.runs == (1.0, 1.0, 1.0)
    slower = ratio(run, "vanilla-all-cores", "card", pair=PAIR, workload=WORKLOAD)
    assert slower is not None and slower.runs == pytest.approx((0.5, 1.0, 0.4)) and slower.median == 0.5
    assert ratio(run, "card", "magic", pair=PAIR, workload=WORKLOAD) is None


def test_of_an_interrupted_run_whole_repeats_count() -> None:
    run = run_with(SECONDS)
    cut = replace(run, status="interrupted", samples=run.samples[:-1])
    assert {sample.repeat for sample in complete_samples(cut)} == {0, 1}
    assert [row.num_repeats for row in summarise(cut)] == [2, 2]


def test_without_a_whole_repeat_the_prompts_that_every_row_answered_count() -> None:
    run = run_with(SECONDS)
    cut = replace(run, status="interrupted", samples=run.samples[:3])
    assert {(sample.prompt, sample.repeat) for sample in complete_samples(cut)} == {(0, 0)}
    assert [row.num_prompts for row in summarise(cut)] == [1, 1]
    assert summarise(replace(run, samples=run.samples[:1])) == []


def test_tokens_of_the_pass_that_reads_the_prompt_are_no_decoding() -> None:
    sample = replace(make_run().samples[0], token_times=((0.5, 3), (1.5, 40)), decode_s=1.0)
    assert sample.decode_tokens == 37 and decode_rate([sample, sample]) == 37.0
    assert decode_rate([]) == 0.0


def test_percentiles_are_values_that_occurred() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert Percentiles.of(float(i) for i in range(1, 101)) == Percentiles(50.0, 90.0, 99.0)


def test_tokens_of_one_pass_have_arrived_at_once() -> None:
    run = run_with({"vanilla-all-cores": [4.0, 4.0, 4.0]})
    (row,) = summarise(run)
    assert row.inter_token == Percentiles(0.0, 0.0, 4.0)  # one gap of 4 s and 38 of none
    assert row.first_token == Percentiles(0.5, 0.5, 0.5)


def decoded(stats: RequestStats | None, num_tokens: int = 10, **changes: Any) -> Sample:
    return replace(
        make_run().samples[0],
        new_tokens=num_tokens + 1,
        token_ids=tuple(range(num_tokens + 1)),
        token_times=((1.0, 1), (2.0, num_tokens + 1)),
        decode_s=1.0,
        wall_s=2.0,
        cpu_s=1.0,
        stats=stats,
        **changes,
    )


def test_what_candidates_cost_is_summed_over_all_samples() -> None:
    one = RequestStats(
        target_passes=4,
        verified_tokens=20,
        accepted_tokens=6,
        accepted_per_depth=[4, 2],
        offered_per_depth=[4, 4, 2],
        verified_by_writer={"beam": 15, "suffix": 5},
        accepted_by_writer={"beam": 4, "beam+suffix": 2},
        hits=2,
        late_hits=1,
        misses=1,
        drafter_passes=30,
        drafter_busy_s=0.5,
        wall_s=0.5,
        drafter_dropped_nodes=50,
        rolled_back_tokens=15,
    )
    other = RequestStats(
        target_passes=6,
        verified_tokens=10,
        accepted_tokens=4,
        accepted_per_depth=[4],
        offered_per_depth=[6],
        hits=2,
        drafter_passes=10,
        drafter_busy_s=0.5,
        wall_s=0.5,
        drafter_dropped_nodes=10,
        rolled_back_tokens=5,
        drafter_restarts=1,
    )
    costs = costs_of([decoded(one), decoded(other)])
    assert costs.target_passes == 10 and costs.drafter_passes == 40
    assert (costs.verified_per_emitted, costs.rolled_back_per_emitted, costs.dropped_per_emitted) == (1.5, 1.0, 3.0)
    assert costs.mean_acceptance_length == 2.0 and costs.acceptance_rate == pytest.approx(1 / 3)
    assert costs.acceptance_per_depth == (0.8, 0.5, 0.0)
    assert costs.accepted_by_writer == {"beam": 0.8, "beam+suffix": 0.2}  # nobody is named where one can propose
    assert costs.hit_rate == 0.5 and (costs.hits, costs.late_hits, costs.misses) == (4, 1, 1)
    assert costs.drafter_layers_per_s == 40.0 and costs.drafter_restarts == 1
    assert costs.ceiling_share == 0.25  # 10 accepted tokens in 1 s, of 40 layers/s


def test_what_a_method_does_not_have_is_none() -> None:
    plain = costs_of([decoded(RequestStats(target_passes=10))])
    assert plain.mean_acceptance_length == 1.0 and plain.target_pass_ms == 0.0 and plain.cores_used == 0.5
    assert plain.hit_rate is plain.verified_per_emitted is plain.acceptance_per_depth is plain.drafter_passes is None
    alone = RequestStats(
        target_passes=5,
        verified_tokens=10,
        accepted_tokens=5,
        accepted_per_depth=[5],
        offered_per_depth=[5],
        accepted_by_writer={"suffix": 5},
    )
    costs = costs_of([decoded(alone)])
    assert costs.accepted_by_writer == {"suffix": 1.0} and costs.verified_per_emitted == 1.0
    assert costs.hit_rate is costs.rolled_back_per_emitted is costs.ceiling_share is None
    theirs = costs_of([decoded(None)])  # transformers says when tokens came, and nothing else
    assert theirs.target_passes == 1 and theirs.mean_acceptance_length == 10.0 and theirs.target_pass_ms is None


def answered(run: Run, numbers: dict[tuple[str, int], str | None], answers: dict[int, str]) -> Run:
    """Return the run with the final number of each row and prompt, and the answer of each prompt."""
    samples = []
    for one in run.samples:
        number = numbers[one.row, one.prompt]
        solved = None if one.prompt not in answers else number == answers[one.prompt]
        samples.append(replace(one, final_number=number, is_solved=solved))
    return replace(run, samples=tuple(samples))


def test_solved_questions_and_numbers_that_stay_are_counted_once_however_often_they_are_repeated() -> None:
    numbers = {("vanilla-all-cores", 0): "7", ("vanilla-all-cores", 1): "9", ("card", 0): "7", ("card", 1): None}
    plain, card = summarise(answered(run_with(SECONDS), numbers, {0: "7", 1: "8"}))
    assert (plain.solved, plain.same_number) == (Share(1, 2), Share(2, 2))
    assert (card.solved, card.same_number) == (Share(1, 2), Share(1, 2))
    assert [row.solved for row in summarise(run_with(SECONDS))] == [None, None]
    assert [row.same_number for row in summarise(run_with(SECONDS))] == [None, None]


def test_a_share_has_wilsons_interval_which_stays_within_all_and_nothing() -> None:
    assert Share(8, 10).interval == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert Share(0, 12).interval == pytest.approx((0.0, 0.2425), abs=1e-4)
    assert Share(12, 12).interval[1] == pytest.approx(1.0)
    assert str(Share(8, 10)) == "80% (49–94)"
