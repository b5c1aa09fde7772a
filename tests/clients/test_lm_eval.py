"""lm_eval scores the served model as it scores the weights alone: with speculation, without, and on transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from card.models.demo import demo_folder
from tests.clients.running import FOLDER, KEY, installed, metric, run_client
from tests.server.running import Command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

GENERATING, CHOOSING = "card_steps", "card_choices"
NUM_QUESTIONS = 12


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What lm_eval found."""

    scores: dict[str, dict[str, float]]  # task -> metric -> value
    texts: list[str]  # of the task that generates, by question
    logprobs: list[list[float]]  # of the task that chooses, by question and choice
    is_greedy: list[list[bool]]


Evaluate = Callable[..., Evaluation]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    program = installed("lm_eval", "run make test-clients")

    def run(model: str, model_args: dict[str, object], *options: str) -> Evaluation:
        folder = tmp_path_factory.mktemp("lm_eval")
        given = ",".join(f"{name}={value}" for name, value in model_args.items())
        run_client(
            *(program, "--model", model, "--model_args", given, "--tasks", f"{GENERATING},{CHOOSING}"),
            *("--include_path", ".", "--batch_size", "1", "--output_path", str(folder), "--log_samples", *options),
            folder=FOLDER / "tasks",
            env={"OPENAI_API_KEY": KEY, "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        )
        return _read(folder)

    return run


@pytest.fixture(scope="module")
def served(server: Command) -> dict[str, object]:
    tokenizer = demo_folder("target")
    address = f"{server.url}/v1/completions"
    return {"model": "demo-target", "base_url": address, "tokenizer": tokenizer, "max_length": 1024}


@pytest.fixture(scope="module")
def with_speculation(evaluate: Evaluate, server: Command, served: dict[str, object]) -> Evaluation:
    before = metric(server.url, "vllm:spec_decode_num_accepted_tokens_total")
    found = evaluate("local-completions", served)
    assert metric(server.url, "vllm:spec_decode_num_accepted_tokens_total") > before, "nothing was speculated"
    return found


@pytest.fixture(scope="module")
def on_transformers(evaluate: Evaluate) -> Evaluation:
    return evaluate("hf", {"pretrained": demo_folder("target"), "dtype": "float32"}, "--device", "cpu")


def test_the_tasks_have_something_to_score(with_speculation: Evaluation) -> None:
    assert len(with_speculation.texts) == len(with_speculation.logprobs) == NUM_QUESTIONS
    assert all(with_speculation.texts)
    assert all(len(choices) == 4 and max(choices) < 0 for choices in with_speculation.logprobs)
    assert 0 < with_speculation.scores[CHOOSING]["acc"] < 1
    assert 0 < with_speculation.scores[GENERATING]["exact_match"] < 1


def test_speculation_changes_no_score_and_no_word(
    evaluate: Evaluate, server: Command, served: dict[str, object], with_speculation: Evaluation
) -> None:
    candidates, refused = "vllm:spec_decode_num_draft_tokens_total", "card_fallbacks_total"
    before = metric(server.url, candidates), metric(server.url, refused, 'cause="request"')
    plain = evaluate("local-completions", served, "--gen_kwargs", "speculation=off")
    assert metric(server.url, candidates) == before[0], "candidates were verified though speculation is off"
    assert metric(server.url, refused, 'cause="request"') > before[1]
    assert plain == with_speculation


def test_the_server_scores_what_transformers_scores(with_speculation: Evaluation, on_transformers: Evaluation) -> None:
    assert with_speculation.scores == on_transformers.scores
    assert with_speculation.texts == on_transformers.texts
    assert with_speculation.is_greedy == on_transformers.is_greedy
    for served, own in zip(with_speculation.logprobs, on_transformers.logprobs, strict=True):
        assert served == pytest.approx(own, abs=1e-4)  # float32 in another order of additions


def _read(folder: Path) -> Evaluation:
    results = json.loads(_only(folder, "results_*.json").read_text("utf-8"))["results"]
    scores = {
        task: {name.partition(",")[0]: value for name, value in found.items() if isinstance(value, float)}
        for task, found in results.items()
    }
    generated, chosen = _samples(folder, GENERATING), _samples(folder, CHOOSING)
    answers = [[json.loads(json.dumps(one[0])) for one in sample["resps"]] for sample in chosen]
    return Evaluation(
        scores=scores,
        texts=[sample["resps"][0][0] for sample in generated],
        logprobs=[[float(logprob) for logprob, _ in choices] for choices in answers],
        is_greedy=[[str(is_greedy) == "True" for _, is_greedy in choices] for choices in answers],
    )


def _samples(folder: Path, task: str) -> list[dict[str, Any]]:
    lines = _only(folder, f"samples_{task}_*.jsonl").read_text("utf-8").splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda sample: int(sample["doc_id"]))


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found
