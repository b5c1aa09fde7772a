"""A trained router: what it learns from, that its training goes on where it was cut off, and whose file it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from card import LLM, SamplingParams
from card.errors import ModelError, PromptError, SettingsError
from card.labs.steps.train_router import collect_steps, train_router
from card.labs.steps.trained import FEATURES, RouterPair, describe
from card.steps import Arbitrage, SolutionReward, Step, TrainedRouter, parse_router
from tests.commands import Ran, run_command
from tests.pair import Pair

SOLUTIONS = {f"{word} {number}": f"#### {number}" for word in ("cat", "mat", "sat") for number in range(7)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def drawn(question: str, answer: str) -> float:
    """A reward that knows nothing: each answer has one of its own."""
    return hashlib.sha256((question + answer).encode()).digest()[0] / 255


def made_router(llms: tuple[LLM, LLM], knob: float | None = None, bias: float = 0.0) -> TrainedRouter:
    pair = RouterPair.of(llms[0].host.runner, llms[1].host.runner)
    return TrainedRouter(torch.zeros(len(FEATURES), dtype=torch.float64), bias, usual=0.5, pair=pair, knob=knob)


QUESTION = "Anna has 3 boxes with 4 apples. She eats 2. How many are left?"
REWARD = SolutionReward({QUESTION: "She has 3*4=<<3*4=12>>12.\n12-2=<<12-2=10>>10 are left.\n#### 10", "x": "#### 7"})


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("She has 3*4=<<3*4=12>>12.\n", 1.0),
        ("3+4=7 apples.\n", 0.0),  # right, and beside the question
        ("3*4=12\n12-2=9\n", 0.5),
        ("3*4=12\n12-2=10\n#### 10", 1.0),
        ("#### 12", 0.0),
        ("She has apples.\n", 1.0),
    ],
)
def test_a_solution_says_which_results_are_right(answer: str, reward: float) -> None:
    assert REWARD(QUESTION, answer) == pytest.approx(reward)


def test_a_solution_without_equations_lets_all_that_hold_count() -> None:
    assert REWARD("x", "3+4=7\n") == 1.0 and REWARD("x", "3+4=8\n") == 0.0 and REWARD("x", "3+4=7\n#### 8") == 0.5


def test_features_see_doubts_writers_and_equations() -> None:
    step = Step("Tom has 3 apples.", "One.\nTwo.\n", "3+4=8\n", 0.5, (0.5, 1.5), ("draft", "target"))
    by_name = dict(zip(FEATURES, describe(step).tolist(), strict=True))
    assert by_name["entropy of the first token"] == 0.5 and by_name["mean entropy"] == 1.0
    assert by_name["share of them by the target"] == 0.5 and by_name["the last one was the target's"] == 1.0
    assert by_name["share of right equations"] == 0.0 and by_name["it has the answer's mark"] == 0.0
    assert by_name["share of its numbers that came before"] == pytest.approx(1 / 3)


def test_a_router_learns_what_tells_steps_apart(llms: tuple[LLM, LLM]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(80, len(FEATURES), generator=generator, dtype=torch.float64)
    found = [(f"question {i % 20}", bool(rows[i, 3] > 0), rows[i].tolist()) for i in range(80)]
    trained = train_router(found, made_router(llms).pair)
    assert trained.area > 0.95 and trained.router.weights.abs().argmax() == 3
    assert 0.3 < trained.entropy_area < 0.7 and trained.num_better == sum(is_better for _, is_better, _ in found)
    with pytest.raises(PromptError, match="better in 0 of 80 cases"):
        train_router([(question, False, row) for question, _, row in found], made_router(llms).pair)


def test_collecting_that_was_cut_off_goes_on_and_finds_the_same(llms: tuple[LLM, LLM], tmp_path: Path) -> None:
    whole = collect_steps(*llms, SOLUTIONS, drawn, tmp_path / "whole.jsonl", max_tokens=8)
    assert {is_better for _, is_better, _ in whole} == {True, False} and {q for q, _, _ in whole} == set(SOLUTIONS)

    def cut_off(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_steps(*llms, SOLUTIONS, drawn, tmp_path / "part.jsonl", max_tokens=8, on_answer=cut_off)
    asked: list[str] = []

    def noted(question: str, answer: str) -> float:
        asked.append(question)
        return drawn(question, answer)

    counts: list[int] = []
    again = collect_steps(*llms, SOLUTIONS, noted, tmp_path / "part.jsonl", max_tokens=8, on_answer=counts.append)
    assert again == whole and set(asked) == set(list(SOLUTIONS)[8:]) and counts == [8, 16, 21]
    with pytest.raises(ModelError, match="of another run: its max_tokens differs"):
        collect_steps(*llms, SOLUTIONS, drawn, tmp_path / "part.jsonl", max_tokens=9)
    (tmp_path / "part.jsonl").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        collect_steps(*llms, SOLUTIONS, drawn, tmp_path / "part.jsonl", max_tokens=8)


def test_the_end_points_of_a_trained_router_are_the_target_and_the_draft_model(
    llms: tuple[LLM, LLM], tmp_path: Path
) -> None:
    made_router(llms, bias=40.0).save(tmp_path / "router.safetensors")  # a chance of 1 in floats
    name = str(tmp_path / "router.safetensors")
    first = Arbitrage(*llms, parse_router(f"{name}:0")).answer(["the cat"], GREEDY)[0]
    last = Arbitrage(*llms, parse_router(f"{name}:1")).answer(["the cat"], GREEDY)[0]
    assert first.exact and first.draft_tokens == 0
    assert not last.exact and last.target_tokens == 0
    assert parse_router(name).knob == 0.5
    with pytest.raises(SettingsError, match=r"from 0 to 1; 0 is exact, 0\.5 is usual"):
        parse_router(f"{name}:2")


def test_a_file_of_another_pair_or_kind_is_refused(llms: tuple[LLM, LLM], pair: Pair, tmp_path: Path) -> None:
    target, draft = (llm.host.runner for llm in llms)
    with LLM(pair.foreign_draft, dtype="float32") as foreign:
        for pair_given, role in (
            ((foreign.host.runner, draft), "target"),
            ((target, foreign.host.runner), "draft model"),
        ):
            with pytest.raises(
                ModelError, match=f"the router was trained for another pair: its {role} is another model"
            ):
                made_router(llms).check_pair(*pair_given)
        turned = RouterPair.of(foreign.host.runner, draft)
    router = TrainedRouter(made_router(llms).weights, 0.0, usual=0.5, pair=turned, knob=None)
    with pytest.raises(ModelError, match="another pair"):
        Arbitrage(*llms, router)
    with pytest.raises(ModelError, match="is no router"):
        parse_router(f"{pair.target}/model.safetensors")
    with pytest.raises(ModelError, match="there is no file"):
        parse_router("none.safetensors")


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path) -> Callable[..., Ran]:
    """Run the command on problems whose solutions are numbers."""
    rows = [json.dumps({"question": question, "answer": answer}) for question, answer in SOLUTIONS.items()]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows))
    models = ("--target", pair.target, "--draft", pair.draft, "--max-tokens", "8")
    return partial(run_command, capfd, "train", "router", *models, "--data", str(tmp_path / "problems.jsonl"))


def test_the_command_writes_a_router_that_generate_takes(
    train: Callable[..., Ran],
    capfd: pytest.CaptureFixture[str],
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("card.labs.steps.train_command.SolutionReward", lambda solutions: drawn)
    out = tmp_path / "router.safetensors"
    ran = train("--out", str(out))
    assert (ran.status, ran.err) == (0, "") and "area under the ROC curve of" in ran.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["problems.jsonl", "router.safetensors"]
    models = ("--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--max-tokens", "8")
    ran = run_command(capfd, "generate", "--json", *models, "--method", "arbitrage", "--router", str(out), "the cat")
    assert ran.status == 0 and json.loads(ran.out)["exact"] is False


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--out", "{tmp}/router.bin"], "must end in .safetensors"),
        (["--out", "{tmp}/none/router.safetensors"], "there is no folder"),
        (["--out", "{tmp}/router.safetensors", "--max-prompts", "9"], "better in 0 of"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    train: Callable[..., Ran], args: list[str], reason: str, tmp_path: Path
) -> None:
    ran = train(*[one.format(tmp=tmp_path) for one in args])
    assert ran.status == 2 and reason in ran.err and ran.err.count("\n") == 1
