"""Acceptance by a coin: as often as set, the same for the same seed, and never in a run that calls itself exact."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from card.errors import SettingsError
from card.tools.bench.forced import ForcedAcceptance
from card.tools.bench.results import load
from card.tree.nodes import Nodes
from card.tree.verify import Verification
from tests.commands import Ran, run_command
from tests.pair import Pair

# A chain of four likely nodes, and beside its first a less likely one that the target would choose.
TREE = Nodes((5, 6, 7, 8, 9), (-1, 0, 1, 2, -1), (-0.1, -0.2, -0.3, -0.4, -2.0), (1, 2, 3, 4, 1))
SEEN = Verification(TREE, torch.zeros(6, 10), [9, 1, 2, 3, 4, 0])


def accepted_counts(rate: float, seed: int, num_rounds: int = 400) -> list[int]:
    verifier = ForcedAcceptance(rate, seed)
    found = []
    for _ in range(num_rounds):
        verdict = verifier.decide(SEEN)
        assert verdict.accepted == (0, 1, 2, 3)[: len(verdict.accepted)], "down the likeliest children"
        assert verdict.next_id == SEEN.choices[len(verdict.accepted)], "then the target's own token"
        found.append(len(verdict.accepted))
    return found


def test_each_candidate_is_accepted_with_the_set_chance_whatever_the_target_chooses() -> None:
    assert set(accepted_counts(0.0, 1)) == {0} and set(accepted_counts(1.0, 1)) == {4}
    counts = accepted_counts(0.6, 1, 4000)
    for depth in range(1, 5):
        reached = sum(count >= depth - 1 for count in counts)
        assert sum(count >= depth for count in counts) / reached == pytest.approx(0.6, abs=0.05)


def test_the_coins_follow_from_the_seed() -> None:
    assert accepted_counts(0.5, 3) == accepted_counts(0.5, 3) != accepted_counts(0.5, 4)


def test_a_rate_that_is_no_chance_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"force_acceptance must be from 0 to 1, got 1\.5"):
        ForcedAcceptance(1.5, 0)


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
