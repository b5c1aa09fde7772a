"""The plug-in inside vLLM: same greedy text, same law of sampled text, whatever happens. Run by make test-vllm."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from card.backends.transformers.loading import load_model
from card.config import parse_parameter_count
from card.models.inflation import inflate
from card.models.loading import load_tokenizer
from tests.inside.vllm.running import run_vllm, start_vllm
from tests.laws import NUM_NEW, NUM_TEXTS, TEMPERATURE, VOCAB_SIZE, chi_square, law_of, mixed_law, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

QUESTIONS = [
    "Ann has 3 apples and buys 4 more. She gives 2 to Tom. How many apples does she have?",
    "A box holds 12 pens. How many pens are in 5 boxes?",
    "Tom had 20 coins, lost 6 of them and found 3. How many coins does Tom have now?",
    "There are 7 days in a week. How many days are in 9 weeks?",
    "Ann has 3 apples and buys 4 more. She gives 2 to Tom. How many apples does Tom have?",
    "A book costs 8 dollars and a pen 2. What do 3 books and 4 pens cost?",
]
ENGINE = {"dtype": "float32", "max_model_len": 384, "max_num_seqs": 4, "enable_prefix_caching": False}
GREEDY = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
CARD = {"draft": "demo-draft", "draft_dtype": "float32"}
IN_TURNS = {"draft": "demo-draft", "draft_dtype": "int8", "schedule": "turns"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo target at the price of 90 M parameters, as an ordinary folder."""
    folder = tmp_path_factory.mktemp("target")
    inflate(load_model("demo-target"), parse_parameter_count("90M")).save_pretrained(folder)
    load_tokenizer("demo-target").save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer("demo-target")
    return [tokenizer.encode(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target: str, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM says without the plug-in."""
    return run_vllm(tmp_path_factory.mktemp("plain"), model=target, prompts=prompts, sampling=GREEDY, engine=ENGINE)


def total(figures: dict[str, Any], name: str) -> int:
    return sum(figures[f"{name}_by_writer"].values())


@pytest.mark.parametrize("card", [CARD, IN_TURNS], ids=["beside", "turns"])
def test_greedy_text_is_the_same_with_the_plug_in_and_takes_fewer_steps(
    target: str, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path, card: dict[str, Any]
):
    with_card = run_vllm(tmp_path, model=target, prompts=prompts, sampling=GREEDY, engine=ENGINE, card=card)
    assert with_card["texts"] == plain["texts"]
    assert with_card["state"] == "up"
    assert len(with_card["step_s"]) < 0.8 * len(plain["step_s"])
    assert total(with_card["figures"], "accepted") > 0
    assert with_card["figures"]["requests_begun"] == len(prompts)


@pytest.mark.parametrize("card", [CARD, IN_TURNS], ids=["beside", "turns"])
def test_preempted_requests_and_shared_prefixes_change_nothing(
    target: str, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path, card: dict[str, Any]
):
    little = {
        "block_size": 32,
        "num_gpu_blocks_override": 13,
        "max_num_seqs": 8,
    }  # memory for four texts, not for eight
    engine = {**ENGINE, **little, "enable_prefix_caching": True}
    twice = [*prompts, *prompts]  # the second time from the prefix cache, or beside the first time
    report = run_vllm(tmp_path, model=target, prompts=twice, sampling=GREEDY, engine=engine, card=card)
    assert report["texts"] == plain["texts"] * 2
    assert report["preemptions"] > 0
    assert report["figures"]["requests_begun"] == len(twice)
    assert report["figures"]["requests_resumed"] > 0


def test_a_killed_drafter_stalls_nothing_and_changes_no_text(
    target: str, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
):
    report = run_vllm(tmp_path, model=target, prompts=prompts, sampling=GREEDY, engine=ENGINE, card=CARD, kill_at=12)
    assert report["texts"] == plain["texts"]
    assert report["state"] != "up" or report["restarts"] > 0
    steps = sorted(report["step_s"])
    assert steps[-1] < 10 * steps[len(steps) // 2] + 1.0  # to start a drafter anew takes seconds
    assert report["figures"]["slowest_propose_s"] < 0.5


# ---- the law of sampled text ----------------------------------------------------------------------------------------


def test_sampled_text_follows_the_law_of_the_target_alone(tmp_path: Path):
    """A chain counts as certain in vLLM's rejection sampler. This is exact for candidates chosen without chance."""
    model = tiny_model(0.0)
    model.save_pretrained(tmp_path / "target")
    tiny_model(0.5).save_pretrained(tmp_path / "draft")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE
    prompt_ids = [0, 1, 2, 3, 4, 0, 1, 2]
    report = run_vllm(
        tmp_path,
        model=str(tmp_path / "target"),
        prompts=[prompt_ids] * NUM_TEXTS,
        sampling={"temperature": TEMPERATURE, "max_tokens": NUM_NEW, "ignore_eos": True},
        engine={**ENGINE, "max_model_len": 64, "max_num_seqs": 8, "skip_tokenizer_init": True, "seed": 7},
        card={"draft": str(tmp_path / "draft"), "draft_dtype": "float32", "row_cost": 0.0},
        num_speculative_tokens=3,
    )
    law = law_of(model, prompt_ids)
    counts = Counter(tuple(text) for text in report["texts"])
    assert set(counts) <= set(law)
    assert chi_square(counts, law) < 4.0
    accepted, proposed = total(report["figures"], "accepted"), total(report["figures"], "proposed")
    assert 1000 < accepted < proposed - 1000  # both happened often enough to be seen in the law
    assert chi_square(counts, mixed_law(law)) > 8.0  # the test can tell


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"writers": "nobody"}, "unknown writer 'nobody'; known: beam,"),
        ({"draft": "no-such-folder/x"}, "no-such-folder/x"),
    ],
)
def test_bad_settings_end_the_start_with_one_line(target: str, tmp_path: Path, card: dict[str, Any], said: str):
    job = {"model": target, "prompts": [[1]], "sampling": GREEDY, "engine": ENGINE, "card": card}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = start_vllm(tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if said in line and "Error" in line]
    assert lines, done.stderr
