"""Plans of blocks and heads, which read their target's states: their bytes, rows, drafts and seconds a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from card import LLM
from card.cli.main import cli
from card.config import SamplingParams
from card.config.registry import methods
from card.engine.metrics import RequestStats
from card.errors import PlanError
from card.models.drafter_facts import DrafterFacts
from card.tools.planner.profile import Profile, load_profile, save_profile
from card.tools.planner.recorder import RecordRequest, record
from card.tools.planner.recording import RecordedText, load_recording, save_recording
from card.tools.planner.simulate import Simulator
from card.tools.planner.synthetic import make_synthetic
from tests.own_block import right_checkpoint
from tests.own_head import FORMS, random_head, save_target
from tests.tools.planner.making import flat, toy_scenario

RIGHT = make_synthetic(1.0, num_texts=1, num_tokens=401)
FACTS = DrafterFacts("a block that drafts, in the target", 1, 60_000_000, 32_000, 40_000_000)
BLOCK = msgspec.structs.replace(flat(1e-3, 5e-5, threads=(1, 2)), drafter=FACTS, kv_row_bytes=2048)
TARGET = flat(1e-2, 3e-4, threads=(1, 2))


def ran(*arguments: str) -> str:
    found = CliRunner().invoke(cli, [*arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def profiled(tmp_path: Path, target: str, draft: str) -> tuple[Profile, float]:
    """Return the profile of what drafts for a target, and the share of a recording at which it is right first."""
    place, texts = tmp_path / "p", tmp_path / "r"
    options = ("--dtype", "float32", "--draft", draft)
    ran("profile", target, *options, "--threads", "1", "--out", str(place))
    ran("record", "--target", target, *options, "--limit", "2", "--max-tokens", "20", "--raw", "--out", str(texts))
    return load_profile(place), load_recording(texts).agreement()


def test_a_block_is_profiled_with_the_bytes_of_a_step_and_of_its_rows_and_recorded_with_its_states(
    tmp_path: Path,
) -> None:
    checkpoint = right_checkpoint("state")
    profile, agreement = profiled(tmp_path, checkpoint.save(tmp_path / "target"), "mtp")
    config = checkpoint.target.config
    head = checkpoint.target.get_output_embeddings().weight.numel()
    numbers = head + sum(one.numel() for one in checkpoint.tensors.values())
    assert profile.drafter is not None and profile.reads_states
    assert profile.drafter.step_bytes == pytest.approx(4 * numbers, rel=0.1)
    assert profile.kv_row_bytes == pytest.approx(2 * 4 * config.num_key_value_heads * config.head_dim, rel=0.1)
    # Behind the prompt the state of the token before says nothing; elsewhere only the right one gives the next token.
    assert agreement == 19 / 20


def test_a_head_is_profiled_and_recorded(tmp_path: Path) -> None:
    head = random_head(FORMS["SafeAILab"])
    profile, _ = profiled(tmp_path, save_target(head, tmp_path / "target"), head.save(tmp_path / "head"))
    assert profile.drafter is not None and (profile.drafter.kind, profile.drafter.num_states) == ("an EAGLE-3 head", 3)


def test_a_draft_model_of_its_own_has_a_profile_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="make its profile by its own name, card profile demo-draft"):
        ran("profile", "demo-target", "--draft", "demo-draft", "--out", str(tmp_path / "p"))


def test_deeper_candidates_are_planned_as_often_right_as_they_are(tmp_path: Path) -> None:
    checkpoint = right_checkpoint("state")
    width, random = len(checkpoint.join), torch.Generator().manual_seed(0)
    # Each step of a chain strays a little further.
    checkpoint.join[:, width:] += 0.18 * torch.randn(width, width, generator=random)
    target = checkpoint.save(tmp_path / "target")
    prompts = tuple(tuple(range(begin, begin + 5)) for begin in (20, 60, 100))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True).resolved()
    recording = record(RecordRequest(target=target, draft="mtp", prompts=prompts, params=params, dtype="float32"))

    def counts(stats: Sequence[RequestStats]) -> list[tuple[int, ...]]:
        counted = ("num_new_tokens", "target_passes", "drafter_passes", "accepted_tokens")
        return [tuple(getattr(one, name) for name in counted) for one in stats]

    chain: dict[str, Any] = {"policy": "fixed", "num_speculative_tokens": 4}
    with LLM(target, "mtp", method="sps", dtype="float32", placement="inline", max_num_seqs=1, **chain) as llm:
        real = counts([one.stats for one in llm.generate([list(prompt) for prompt in prompts], params)])
    scenario = toy_scenario(target=TARGET, draft=BLOCK, recording=recording)
    assert counts(Simulator(scenario).run("sps", {**chain, "placement": "inline"}).stats) == real

    def without_deeper(text: RecordedText) -> RecordedText:
        return msgspec.structs.replace(text, deeper_ids=b"", deeper_logprobs=b"")

    flat_texts = tuple(without_deeper(text) for text in recording.texts)
    hopeful = replace(scenario, recording=msgspec.structs.replace(recording, texts=flat_texts))
    planned = counts(Simulator(hopeful).run("sps", {**chain, "placement": "inline"}).stats)
    assert sum(accepted for *_, accepted in planned) > 1.2 * sum(accepted for *_, accepted in real) > 0


def seconds_a_round(draft: Profile) -> float:
    scenario = toy_scenario(target=TARGET, draft=draft, recording=RIGHT)
    settings: dict[str, Any] = {"num_speculative_tokens": 4}
    run = Simulator(scenario).run("sps", settings)
    assert run.total.mean_acceptance_length == pytest.approx(5.0)
    return run.decode_s / (run.num_tokens / 5)


def test_a_round_of_a_block_runs_the_accepted_tokens_again_and_one_of_a_draft_model_does_not() -> None:
    target_s = 1e-2 + 4 * 3e-4
    first_s = 1e-3 + 4 * 5e-5  # of four accepted tokens and the target's own, with states of the target
    assert seconds_a_round(BLOCK) == pytest.approx(target_s + first_s + 3 * 1e-3, rel=0.003)
    of_its_own = 1e-3 + 5e-5  # the last candidate and the target's own
    assert seconds_a_round(msgspec.structs.replace(BLOCK, drafter=None)) == pytest.approx(
        target_s + of_its_own + 3 * 1e-3, rel=0.003
    )


@pytest.mark.parametrize(
    "method", [name for name, one in methods().items() if one.needs_draft and not one.needs_training]
)
def test_texts_are_the_recorded_ones_with_every_method(method: str) -> None:
    simulator = Simulator(toy_scenario(target=TARGET, draft=BLOCK))
    assert simulator.run(method).total.verified_tokens


def test_a_plan_tells_what_the_drafter_reads(tmp_path: Path) -> None:
    for name, profile in (("t", TARGET), ("d", BLOCK)):
        save_profile(profile, tmp_path / name)
    save_recording(RIGHT, tmp_path / "r")
    files = ("--target", str(tmp_path / "t"), "--draft", str(tmp_path / "d"), "--recording", str(tmp_path / "r"))
    told = " ".join(ran("plan", *files, "--methods", "sps", "--no-search").split())
    assert "a step reads 60.0 MB, of which 40.0 MB are the head of 32,000 tokens; 2.0 kB a token of text" in told


def test_a_block_is_not_planned_on_a_draft_server() -> None:
    with pytest.raises(PlanError, match="states, which do not leave the process: plan it without a draft server"):
        replace(toy_scenario(draft=BLOCK), network_s=0.005)
