"""`card check-pair`: what it says of a pair, why it says no, and its exit status. Never how fast a machine is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import DraftSettings, Schedule
from card.engine.policy.rounds import ScheduleCost
from card.errors import PromptError
from card.machine.expert_cost import ExpertCounts
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.models.loading import load_tokenizer
from card.tools.check_pair import command as check_pair
from card.tools.check_pair.command import MOST_MEASURING_S, examine
from card.tools.check_pair.facts import PairReport, latencies, verdict
from card.tools.check_pair.measuring import TimeLimit, measure_agreement, measure_speeds
from tests.commands import Ran, run_command
from tests.pair import Pair, make_model

NUM_TOKENS = 24
PROMPTS = ("the cat sat on", "one two three", "and the other mat")
STEPS = [
    "loading the models",
    "bringing up the draft model, in turns with the target",
    "comparing what the two models write",
    "measuring passes under each schedule, and bringing the drafter up",
    *(f"decoding the sample prompts plainly and with card: run {run} of 4" for run in (1, 2, 3, 4)),
]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run the command inside this process; it may measure for as long as a busy machine takes."""
    monkeypatch.setattr(check_pair, "MOST_MEASURING_S", 3600.0)
    return partial(run_command, capfd, "check-pair")


@pytest.fixture(scope="module")
def useless_draft(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft of the target's tokenizer that agrees with it by chance only."""
    folder = tmp_path_factory.mktemp("useless")
    tokenizer = load_tokenizer(pair.target)
    make_model(len(tokenizer), noise=20.0).save_pretrained(folder)
    tokenizer.save(folder)
    return str(folder)


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]) + "\n", encoding="utf-8")
    return str(path)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_demo_pair_gets_a_verdict_that_the_exit_status_repeats(run):
    ran = run("--dtype", "float32", "--max-tokens", "8", "--max-model-len", "256", columns=100)
    lines = ran.out.splitlines()
    assert lines[0] == "target demo-target, draft demo-draft"
    assert ran.status == (0 if any(line.startswith("yes: ") for line in lines[-5:]) else 1)
    draft = "--draft demo-draft" if ran.status == 0 else "--method suffix"
    assert lines[-1] == f"run it: card chat --target demo-target {draft} --dtype float32 --max-model-len 256"
    assert ran.status == 0 or "no: " in ran.out
    assert "\ntarget: own pass in float32; trees of candidates\ndraft: own pass in float32;" in ran.out
    for part in ("tokenizers fit", "memory", "milliseconds a pass", "agreement", "predicted", "measured", "speed-up"):
        assert part in ran.out
    assert "The texts are the same." in " ".join(ran.out.split())
    assert max(map(len, lines)) <= 100


def test_a_useless_draft_is_a_no_for_its_agreement_and_json_tells_everything(run, pair, useless_draft, prompts_file):
    args = ("--prompts", prompts_file, "--max-tokens", "24", "--dtype", "float32", "--max-model-len", "128", "--json")
    ran = run(pair.target, useless_draft, *args)
    assert ran.status == 1
    assert ran.err.splitlines() == STEPS, "in a pipe, too"
    report = json.loads(ran.out)
    assert report["left_out"] == []
    assert not report["is_worth_it"]
    assert "of the drafted tokens" in report["reason"]
    assert report["agreement"]["share"] < 0.04
    assert report["agreement"]["num_prompts"] == len(PROMPTS)
    assert report["how_run"] == ["own pass in float32; trees of candidates"] * 2
    target, draft = report["memory"]
    assert target["weight_bytes"] == 4 * target["num_parameters"]
    assert target["kv_bytes_per_token"] == 2 * 2 * 16 * 4  # keys and values, 2 heads of 16 float32, 1 layer
    assert target["kv_bytes_per_request"] == 128 * target["kv_bytes_per_token"]
    one_copy = draft["weight_bytes"] + draft["packed_bytes"] + draft["kv_bytes_per_request"]
    assert draft["total_bytes"] == draft["num_copies"] * one_copy
    assert {one["model"] for one in report["latencies"]} == {"target", "draft"}
    assert report["speeds"]["is_same_text"]
    assert set(report["predicted_tokens_per_s"]) > {"off"}
    assert len(report["speeds"]["speed_up_of_runs"]) == 3
    shares = report["speeds"]["accepted_shares"]
    assert sum(shares.values()) == pytest.approx(1.0 if report["speeds"]["num_accepted"] else 0.0)


def test_tokenizers_that_differ_are_a_no_that_names_the_first_difference(run, pair):
    ran = run(pair.target, pair.foreign_draft)
    assert (ran.status, ran.err) == (1, "loading the models\n")
    assert "no: tokenizers differ: " in ran.out
    assert "only the target's has token 270" in ran.out
    report = json.loads(run(pair.target, pair.foreign_draft, "--json").out)
    assert (report["is_worth_it"], report["speeds"]) == (False, None)
    assert "token 270" in report["reason"]


@pytest.mark.parametrize(
    ("content", "said"), [(b"\n \n", "holds no prompts"), (b"\xff", "not valid UTF-8"), (None, "does not exist")]
)
def test_prompts_that_cannot_be_read_are_one_line_and_status_2(run, pair, tmp_path, content, said):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    ran = run(pair.target, pair.draft, "--prompts", str(path))
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


def test_a_target_without_a_draft_is_an_error(run, pair):
    ran = run(pair.target)
    assert ran.status == 2
    assert "needs a draft model" in ran.err


ENDLESS = TimeLimit(math.inf)
INLINE = {"placement": "inline", "policy": "fixed"}


# ---- what it measures -----------------------------------------------------------------------------------------------


def sps(target: str, draft: str) -> LLM:
    return LLM(target, draft, method="sps", dtype="float32", max_model_len=256)


def test_a_model_agrees_with_itself_entirely(pair):
    agreement = measure_agreement(sps(pair.target, pair.target), PROMPTS, 24, ENDLESS)
    assert agreement.share == 1.0
    assert set(agreement.taken_by_depth) == {1.0}
    assert agreement.tokens_per_pass > 3


def next_ids(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Return the greedy continuation, past end tokens."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[len(ids) - count :]


def test_agreement_counts_each_drafted_token_up_to_the_first_that_is_not_taken(pair):
    llm = sps(pair.target, pair.draft)
    target, draft = load_model(pair.target, dtype="float32"), load_model(pair.draft, dtype="float32")
    messages = [{"role": "user", "content": PROMPTS[0]}]
    prompt_ids = list(llm.host.encode(messages))
    text = next_ids(target, prompt_ids, NUM_TOKENS)
    assert not set(target.config.eos_token_id) & set(text), "choose another prompt"
    chain_lengths: list[tuple[int, int]] = []  # offered, taken
    done = 1
    while done < NUM_TOKENS:
        chain = next_ids(
            draft, prompt_ids + text[:done], min(6, NUM_TOKENS - done - 1)
        )  # the last token is never drafted
        num_taken = next((i for i, token_id in enumerate(chain) if token_id != text[done + i]), len(chain))
        chain_lengths.append((len(chain), num_taken))
        done += num_taken + 1
    agreement = measure_agreement(llm, PROMPTS[:1], NUM_TOKENS, ENDLESS)
    num_compared = sum(min(offered, taken + 1) for offered, taken in chain_lengths)
    num_taken = sum(taken for _, taken in chain_lengths)
    assert agreement.share == pytest.approx(num_taken / num_compared)
    assert agreement.tokens_per_pass == pytest.approx(1 + num_taken / sum(offered > 0 for offered, _ in chain_lengths))
    first = sum(taken > 0 for _, taken in chain_lengths) / sum(offered > 0 for offered, _ in chain_lengths)
    assert agreement.taken_by_depth[0] == pytest.approx(first)
    assert len(agreement.taken_by_depth) == 6
    assert (agreement.num_prompts, agreement.num_tokens) == (1, NUM_TOKENS)


def test_answers_too_short_to_compare_anything_are_an_error(pair):
    with pytest.raises(PromptError, match="too short"):
        measure_agreement(sps(pair.target, pair.draft), PROMPTS, 1, ENDLESS)


# ---- a slow pair ----------------------------------------------------------------------------------------------------

PASS_S = 0.25  # of the slow target: 4 tokens a second


class Clock:
    """Goes on by the passes of slow models, and by ``look_s`` at each look."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.now = 100.0
        self._look_s = look_s

    def __call__(self) -> float:
        self.now += self._look_s
        return self.now


def slowed(llm: LLM, clock: Clock) -> LLM:
    """Return the LLM with a target whose passes take a quarter of a second by this clock."""
    forward = llm.host.runner.forward

    def slow(extensions: Any) -> Any:
        clock.now += PASS_S
        return forward(extensions)

    llm.host.runner.forward = slow  # type: ignore[method-assign]
    return llm


def test_agreement_of_a_slow_pair_is_that_of_what_was_decoded_in_time(pair):
    clock = Clock()
    whole = measure_agreement(sps(pair.target, pair.draft), PROMPTS, 64, ENDLESS)
    agreement = measure_agreement(slowed(sps(pair.target, pair.draft), clock), PROMPTS, 64, TimeLimit.of(5.0, clock))
    assert clock.now <= 105.0 + PASS_S
    assert agreement.is_cut and not whole.is_cut
    assert 0 < agreement.num_tokens < whole.num_tokens
    assert (agreement.num_prompts, whole.num_prompts) == (1, len(PROMPTS))
    none = measure_agreement(slowed(sps(pair.target, pair.draft), clock), PROMPTS, 64, TimeLimit.of(-1.0, clock))
    assert none.num_prompts == 1, "one pass at least"


@pytest.mark.parametrize(("seconds", "num_runs"), [(20.0, 1), (60.0, 1), (10_000.0, 3)])
def test_speeds_of_a_slow_pair_are_measured_within_their_time(pair, seconds, num_runs):
    clock = Clock()
    limit, told = TimeLimit.of(seconds, clock), []
    with (
        LLM(pair.target, method="vanilla", dtype="float32", max_model_len=256) as plain,
        LLM(pair.target, pair.target, method="card", dtype="float32", max_model_len=256, **INLINE) as tuned,
    ):
        speeds = measure_speeds(slowed(plain, clock), slowed(tuned, clock), PROMPTS, 64, limit, told.append)
    assert clock.now <= 100.0 + seconds + 2 * PASS_S
    assert speeds is not None
    assert speeds.plain_tokens_per_s == pytest.approx(1 / PASS_S)
    assert speeds.speed_up > 1.5, "the drafter is perfect, and its passes take no time here"
    assert len(speeds.speed_up_of_runs) == num_runs
    assert speeds.is_cut == (num_runs < 3)
    assert speeds.is_same_text
    assert told == STEPS[4 : 5 + num_runs]


# Fixed, as a busy machine may find that a draft as large as its target does not pay.
IN_TURNS = {"schedule": "turns", "policy": "fixed", "beam_width": 1}
BESIDE = {"placement": "thread", "policy": "fixed", "max_wait_s": 20.0, "min_depth": 2}


@pytest.mark.parametrize(("where", "shape"), [(IN_TURNS, "chain"), (BESIDE, "tree")])
def test_speeds_say_what_was_drafted_and_who_wrote_what_was_accepted(pair, where, shape, capsys):
    with (
        LLM(pair.target, method="vanilla", dtype="float32", max_model_len=256) as plain,
        LLM(pair.target, pair.target, method="card", dtype="float32", max_model_len=256, **where) as tuned,
    ):
        speeds = measure_speeds(plain, tuned, PROMPTS, 24, ENDLESS)
    assert speeds is not None
    assert (speeds.shape, speeds.schedule) == (shape, "turns" if shape == "chain" else "beside")
    assert speeds.num_accepted > 24, "of all prompts and timed runs"
    assert sum(speeds.accepted_shares.values()) == pytest.approx(1.0)
    drafted = sum(share for name, share in speeds.accepted_shares.items() if "beam" in name)
    assert speeds.drafted_share == pytest.approx(drafted) and drafted > 0.0
    report = PairReport(pair.target, pair.target, True, "2.00x the speed of plain decoding", speeds=speeds)
    check_pair.print_report(Console(width=200), report, is_wide=False)
    verdict_lines = capsys.readouterr().out.splitlines()[1:3]
    place = "in turns" if shape == "chain" else "beside the target"
    assert verdict_lines[0].startswith("yes: ")
    assert verdict_lines[1].startswith(f"{place}: the draft model wrote a {shape}")
    assert f"; accepted {speeds.num_accepted}: {speeds.drafted_share:.0%} drafted (beam" in verdict_lines[1]


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 2.0])
def test_where_there_is_no_time_to_tell_a_speed_none_is_told(pair, seconds):
    clock = Clock()
    with (
        LLM(pair.target, method="vanilla", dtype="float32", max_model_len=256) as plain,
        LLM(pair.target, pair.draft, method="card", dtype="float32", max_model_len=256, **INLINE) as tuned,
    ):
        limit = TimeLimit.of(seconds, clock)
        assert measure_speeds(slowed(plain, clock), slowed(tuned, clock), PROMPTS, 64, limit) is None
    assert clock.now <= 104.0


@pytest.mark.parametrize(("look_s", "has_speeds"), [(0.5, True), (50.0, False)])
def test_a_pair_is_answered_with_what_is_known_by_then_and_what_was_left_out(pair, look_s, has_speeds, capsys):
    clock, told = Clock(look_s), []
    options = {"dtype": "float32", "device": "cpu", "draft_device": None, "target_cost": None, "max_model_len": 256}
    report = examine(pair.target, pair.draft, PROMPTS, 64, options, told.append, clock)
    assert clock.now <= 100.0 + MOST_MEASURING_S + 20 * look_s
    assert told == STEPS[1 : len(told) + 1]
    assert (report.speeds is not None) == has_speeds
    assert "agreement is that of" in report.left_out[0] and "prompts" in report.left_out[0]
    assert len(report.left_out) == 2
    assert report.predicted_tokens_per_s is not None and "off" in report.predicted_tokens_per_s
    if has_speeds:
        assert report.left_out[1].startswith("speed is that of 1 of 3 pairs of runs and of ")
    else:
        assert report.left_out[1] == "no speed was measured"
        assert "is predicted, and there was no time to measure it" in report.reason
    check_pair.print_report(Console(width=200), report, is_wide=False)
    said = capsys.readouterr().out
    assert f"Measuring took all of its 60 s and was cut short: {'; '.join(report.left_out)}." in said


# ---- what follows from it -------------------------------------------------------------------------------------------


def costs(*, drafter_ms: float = 0.5, more_ms: float = 0.1) -> dict[Schedule, ScheduleCost]:
    """Return a target of 10 ms a pass, ``more_ms`` for each further token, and a drafter of so many ms a pass."""
    target = PassCost(((1, 0.010), (17, 0.010 + 16e-3 * more_ms)))
    drafter = PassCost(((1, 1e-3 * drafter_ms), (16, 1.2e-3 * drafter_ms)))
    one, two = CoreSet((), 1), CoreSet((), 2)
    slower = target.scaled(1.1)
    return {
        "beside": ScheduleCost(one, slower, drafter),
        "turns": ScheduleCost(two, target, drafter),
        "off": ScheduleCost(two, target),
    }


def test_a_good_pair_that_was_faster_is_a_yes_with_its_speed_up():
    assert verdict(costs(), 0.85, 2.41, DraftSettings()) == (True, "2.41x the speed of plain decoding")


@pytest.mark.parametrize(
    ("given", "agreement", "said"),
    [
        ({}, 0.02, "agreement is too low: the target takes 2% of the drafted tokens"),
        ({"drafter_ms": 15.0}, 0.8, "the drafter is too slow: its pass takes 136% of the target's"),
        ({"more_ms": 10.0}, 0.8, "verification costs too much: a target pass of 8 takes 8.0 times"),
        ({"drafter_ms": 15.0, "more_ms": 10.0}, 0.05, "there is no single obstacle"),
    ],
)
def test_the_reason_for_a_no_is_what_would_help_most_were_it_otherwise(given, agreement, said):
    is_worth_it, reason = verdict(costs(**given), agreement, 0.97, DraftSettings())
    assert not is_worth_it
    assert reason.startswith("0.97x: ")
    assert said in reason
    assert ("would be expected" in reason) == ("no single" not in said)


def test_rows_that_are_dear_for_their_experts_are_said_to_be():
    counts, (drafter, two) = (
        ExpertCounts(num_experts=64, per_row=8),
        (PassCost(((1, 5e-4), (16, 6e-4))), CoreSet((), 2)),
    )
    target = PassCost(((1, 0.01), (8, 0.045)), experts=counts)
    dear: dict[Schedule, ScheduleCost] = {
        "turns": ScheduleCost(two, target, drafter),
        "off": ScheduleCost(two, target),
    }
    is_worth_it, reason = verdict(dear, 0.4, 0.97, DraftSettings())
    assert not is_worth_it
    assert "8 takes 4.5 times as long as one of 1, as each token brings experts of its own; at the same time" in reason


def test_where_no_speed_was_measured_the_prediction_decides_and_says_so():
    is_worth_it, reason = verdict(costs(), 0.85, None, DraftSettings())
    assert is_worth_it
    assert reason.endswith("is predicted, and there was no time to measure it")
    is_worth_it, reason = verdict(costs(), 0.02, None, DraftSettings())
    assert not is_worth_it
    assert "agreement is too low" in reason


def test_a_speed_up_that_agreement_cannot_give_is_noise_and_a_no():
    is_worth_it, reason = verdict(costs(), 0.02, 1.6, DraftSettings())
    assert not is_worth_it
    assert "agreement is too low" in reason


def test_a_prediction_that_was_not_reached_says_so():
    is_worth_it, reason = verdict(costs(), 0.85, 0.9, DraftSettings())
    assert not is_worth_it
    assert "was predicted" in reason and "idle machine" in reason


def test_a_target_that_runs_alike_with_and_without_turns_is_listed_once():
    listed = [(one.model, one.schedule) for one in latencies(costs())]
    assert listed == [("target", "beside"), ("target", "off"), ("draft", "beside"), ("draft", "turns")]
    assert latencies(costs())[1].pass_ms[1] == pytest.approx(10.0)


def test_the_next_command_has_the_users_models_and_options_quoted_and_no_draft_model_that_does_not_pay(monkeypatch):
    monkeypatch.delenv("CARD_KERNELS", raising=False)
    asked = dict.fromkeys(check_pair.CARRIED) | {"dtype": "auto", "device": "cpu", "max_model_len": 512}
    asked |= {"cores": (0, 1), "draft_cores": (1,), "draft_threads": 2}
    assert check_pair.next_command("my models/big", "small", asked) == (
        "card chat --target 'my models/big' --draft small --max-model-len 512 --draft-threads 2 --cores 0,1 "
        "--draft-cores 1"
    )
    assert check_pair.next_command("big", None, asked) == "card chat --target big --max-model-len 512 --cores 0,1"
