"""Acceptance by a coin: as often as set, the same for the same seed, and never in a run that calls itself exact."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from card.assembly.drafters import link_here
from card.assembly.latency.timing import measure_pass_cost
from card.config import DraftSettings
from card.drafting.beam import BeamWriter
from card.engine.engine import Engine
from card.engine.policy.rounds import Outcome, ScheduleCost
from card.engine.policy.tuned import TunedPolicy
from card.engine.target import TargetWorker
from card.errors import SettingsError
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.tools.bench.forced import ForcedAcceptance
from card.tools.bench.results import load
from card.tree.nodes import Nodes
from card.tree.verify import Verification
from tests.commands import Ran, run_command
from tests.decoding import GREEDY, make_request, plain, run_all
from tests.pair import Pair
from tests.routed import RoutedTable

# A chain of four likely nodes, and beside its first a less likely one that the target would choose.
TREE = Nodes((5, 6, 7, 8, 9), (-1, 0, 1, 2, -1), (-0.1, -0.2, -0.3, -0.4, -2.0), (1, 2, 3, 4, 1))


def seen_at(place: int, offer: Nodes = TREE) -> Verification:
    return Verification(offer, torch.zeros(1 + len(offer), 10), [9, 1, 2, 3, 4, 0][: 1 + len(offer)], place)


def accepted_counts(rate: float, seed: int, num_rounds: int = 400) -> list[int]:
    verifier = ForcedAcceptance(rate, seed)
    found = []
    for idx in range(num_rounds):
        seen = seen_at(5 * idx)
        verdict = verifier.decide(seen)
        assert verdict.accepted == (0, 1, 2, 3)[: len(verdict.accepted)], "down the likeliest children"
        assert verdict.next_id == seen.choices[len(verdict.accepted)], "then the target's own token"
        found.append(len(verdict.accepted))
    return found


def test_each_candidate_is_accepted_with_the_set_chance_whatever_the_target_chooses() -> None:
    assert set(accepted_counts(0.0, 1)) == {0} and set(accepted_counts(1.0, 1)) == {4}
    counts = accepted_counts(0.6, 1, 4000)
    for depth in range(1, 5):
        reached = sum(count >= depth - 1 for count in counts)
        assert sum(count >= depth for count in counts) / reached == pytest.approx(0.6, abs=0.05)


def test_a_refused_candidate_does_not_come_back_as_the_targets_own_token() -> None:
    chosen, likely = 5, 3
    logits = torch.zeros(1 + len(TREE), 10)
    logits[:, chosen], logits[:, likely] = 2.0, 1.0
    seen = Verification(TREE, logits, [chosen] * (1 + len(TREE)), 0)
    assert ForcedAcceptance(0.0, 1).decide(seen).next_id == likely, "the likeliest other token"
    logits[:, [idx for idx in range(10) if idx != chosen]] = -torch.inf
    assert ForcedAcceptance(0.0, 1).decide(seen).next_id == chosen, "but none that is ruled out"


def test_the_coins_follow_from_the_seed() -> None:
    assert accepted_counts(0.5, 3) == accepted_counts(0.5, 3) != accepted_counts(0.5, 4)


def test_a_place_in_a_text_has_the_same_coin_however_long_the_drafts_are() -> None:
    accepts_at: dict[int, set[bool]] = {}
    for length in (1, 2, 4):
        verifier, place = ForcedAcceptance(0.5, 1), 0
        while place < 100:
            accepted = len(verifier.decide(seen_at(place, TREE.leading(length))).accepted)
            for i in range(min(accepted + 1, length)):
                accepts_at.setdefault(place + i, set()).add(i < accepted)
            place += accepted + 1
    assert all(len(one) == 1 for one in accepts_at.values()) and {True} in accepts_at.values()


def test_a_rate_that_is_no_chance_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"force_acceptance must be from 0 to 1, got 1\.5"):
        ForcedAcceptance(1.5, 0)


def on_experts(rate: float, draft_seed: int = 1) -> tuple[list[int], list[Outcome], RoutedTable, TunedPolicy]:
    """Return what forced acceptance writes on a toy with experts under a policy that takes turns, and its rounds.

    Args:
        draft_seed: 0: the draft model is the target, so that all its candidates are the target's own tokens.
    """
    target, draft = (RoutedTable(seed, vocab_size=200, max_model_len=700, num_tree_rows=64) for seed in (0, draft_seed))
    target.seconds_of = 1e-2, 2e-4, 1e-4  # on its own clock, which no drafter moves
    cost = measure_pass_cost(target, clock=target.clock, time_limit_s=100.0)
    drafter = PassCost(((1, 1e-4), (64, 1e-3)))
    policy, rounds = TunedPolicy({"turns": ScheduleCost(CoreSet(), cost, drafter)}, DraftSettings()), list[Outcome]()
    observe = policy.observe
    policy.observe = lambda outcome: (rounds.append(outcome), observe(outcome))  # type: ignore[method-assign]
    worker = TargetWorker(target, clock=target.clock, verifier=ForcedAcceptance(rate, 0))
    link = link_here("inline", BeamWriter(draft), clock=target.clock)
    engine = Engine(worker, link, policy=policy, clock=target.clock)
    text, _ = run_all(engine, {0: [make_request(0, params=GREEDY.replace(max_tokens=600))]})[0]
    return text, rounds, target, policy


@pytest.mark.parametrize("rate", [0.0, 0.6, 0.8])
def test_on_experts_drafts_are_forced_as_often_as_set_and_no_pass_reads_an_expert_twice(rate: float) -> None:
    text, rounds, target, _ = on_experts(rate)
    seen = [one for outcome in rounds for one in outcome.result.verified]
    reached = sum(min(len(one.offer), len(one.accepted) + 1) for one in seen)
    assert reached > 0
    assert sum(len(one.accepted) for one in seen) / reached == pytest.approx(rate, abs=0.06)
    facts = target.experts
    per_row, most = (facts.num_expert_layers * one for one in (facts.experts_per_token, facts.num_experts))
    for result in (outcome.result for outcome in rounds if not outcome.view.num_prompt_tokens):
        assert per_row <= result.num_experts <= min(most, per_row * result.num_tokens)
    assert any(outcome.result.num_experts < per_row * outcome.result.num_tokens for outcome in rounds)
    assert on_experts(rate)[0] == text, "the coins and the clock decide"


@pytest.mark.parametrize("draft_seed", [0, 1])
def test_the_policy_believes_the_coins_even_where_the_draft_is_always_right(draft_seed: int) -> None:
    _, _, _, policy = on_experts(0.8, draft_seed)
    assert policy.agreement == pytest.approx(0.8, abs=0.04)


def test_on_experts_a_text_without_accepted_drafts_is_the_targets_own() -> None:
    text, _, target, _ = on_experts(0.0)
    assert (text, "length") == plain(target, params=GREEDY.replace(max_tokens=600))


@pytest.fixture
def card(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return partial(run_command, capfd)


@pytest.mark.timeout(240)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_bench_with_forced_acceptance_accepts_a_foreign_draft_and_says_that_it_is_not_exact(
    card: Callable[..., Ran], pair: Pair, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "bench.jsonl"
    prompts.write_text(json.dumps({"question": "how many cats sat?"}), encoding="utf-8")
    common = ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--prompts", str(prompts)]
    options = ["--methods", "sps-all-cores", "--sps-lengths", "3", "--repeats", "1", "--max-tokens", "9"]
    ran = card("bench", *common, *options, "--force-acceptance", "1", "--out", str(out))
    assert ran.status == 0
    (run,) = load(out)
    assert {row.name: row.is_exact for row in run.rows} == {"vanilla-all-cores": True, "sps-all-cores": False}
    assert {row.name: row.settings.get("force_acceptance") for row in run.rows}["sps-all-cores"] == 1.0
    drafted = next(one for one in run.samples if one.row == "sps-all-cores")
    assert drafted.stats.accepted_tokens == drafted.stats.verified_tokens > 0


def test_outside_the_bench_nothing_forces_acceptance(card: Callable[..., Ran], pair: Pair) -> None:
    ran = card("generate", "hello", "--target", pair.target, "--force-acceptance", "1")
    assert ran.status == 2 and "No such option" in ran.err
