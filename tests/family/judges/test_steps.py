"""Arbitrage: a drafted step stays whole if its reward says so, at every door, and no result hides it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from card import LLM, SamplingParams
from card.cli.parts.options import DEMO_DRAFT, DEMO_TARGET
from card.config.registry import methods
from card.errors import ModelError, SettingsError
from card.family.judges.auto import PairFacts
from card.family.judges.choosing import reward_verifier
from card.family.judges.judge import JudgingVerifier
from card.family.judges.mining import Miner, Mismatches, StepMiner
from card.family.judges.steps import StepReward, last_of_step, step_ends
from card.family.judges.train_judge import train_judge
from card.family.learning.regression import fit_ridge
from card.models.runner import RowRunner
from card.tree.nodes import ROOT, Nodes
from card.tree.verify import Verification
from tests.commands import Ran, run_command
from tests.crosses.doors import DOORS, REQUESTS, Setup
from tests.family.judges.rewards import write_reward
from tests.family.judges.test_auto import greedy, runner
from tests.figures import check_figures
from tests.pair import Pair

END = 1  # a token that ends a step
PROMPTS = ["the cat sat", "one two three"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_a_step_ends_with_the_first_line_s_end_along_the_likeliest_children() -> None:
    tree = Nodes((5, 6, END, 7, END), (ROOT, 0, 1, 0, 3))
    assert last_of_step(tree, 0, frozenset({END})) == 2 and last_of_step(tree, 3, frozenset({END})) == 4
    assert last_of_step(tree, 2, frozenset({END})) == 2  # a line's end by itself
    assert last_of_step(tree, 0, frozenset({9})) is None


def test_tokens_with_a_line_s_end_and_those_of_the_answer_end_a_step() -> None:
    assert step_ends(["a", "\n", ".\n\n", "b", "</s>"].__getitem__, 5, frozenset({4})) == {1, 2, 4}


def reward_of(weights: Sequence[float], knob: float, ends: frozenset[int] = frozenset({END})) -> StepReward:
    pair = PairFacts("draft", np.ones(8 * len(weights), np.float32))
    return StepReward(np.array(weights, np.float32), 0.0, usual=0.5, pair=pair, knob=knob, ends=ends)


def test_a_step_stays_or_goes_by_the_state_at_its_last_token() -> None:
    """The target chooses 0 everywhere, so that every candidate is a mismatch."""
    offer = Nodes.chain((5, 6, END, 7), (-1.0, -2.0, -3.0, -4.0))
    states = np.zeros((5, 2), np.float32)
    logits = np.zeros((5, 8), np.float32)
    for state, kept in ((-9.0, (0, 1, 2)), (9.0, ())):  # the unfinished step after it goes
        states[3, 0] = state
        seen = Verification(offer, logits, [0] * 5, 0, states)
        assert JudgingVerifier(reward_of((1.0, 0.0), 0.5)).decide(seen).accepted == kept
    states[:] = -9.0
    seen = Verification(offer, logits, [0] * 5, 0, states)
    assert JudgingVerifier(reward_of((1.0, 0.0), 0.0)).decide(seen).accepted == ()
    assert JudgingVerifier(reward_of((1.0, 0.0), 1.0, frozenset({9}))).decide(seen).accepted == ()


def test_a_trained_reward_has_the_probabilities_of_the_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn((120, 6), generator=generator) * 2 + 1
    labels = states[:, 1] > 1
    mined = Mismatches(states, labels, torch.arange(120) // 3)
    trained = train_judge(mined, PairFacts("draft", np.ones(48, np.float32)), StepReward, ends=frozenset({END}))
    assert isinstance(trained.judge, StepReward) and trained.judge.ends == {END} and trained.area > 0.95
    weights, bias = fit_ridge(states.double(), labels, trained.ridge)
    expected = (states.double() @ weights + bias).sigmoid()
    found = [trained.judge.importance(row.numpy()) for row in states]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


# ---- mining ----------------------------------------------------------------------------------------------------------

IDS = [[5, 9, 2], [7, 1], [11, 12, 13, 14], [30, 2, 8], [3, 3], [21, 4]]
ENDS = frozenset({0, *range(2, 40, 7)})


@pytest.fixture(scope="module")
def runners() -> tuple[RowRunner, RowRunner]:
    return runner(3), runner(3, noise=0.15)


def is_right(_: int, token_ids: Sequence[int]) -> bool:
    return token_ids[-1] % 3 != 0


def test_mining_labels_each_drafted_step_by_the_answer_that_follows_from_it(
    runners: tuple[RowRunner, RowRunner],
) -> None:
    target, draft = runners
    miner = StepMiner(*runners, step_ends=ENDS, answer_of=is_right, max_tokens=12, end_ids=frozenset({0}))
    mined = Mismatches.joined(list(miner.mine(list(enumerate(IDS)))))
    expected, longest = [], 0
    for idx, prompt in enumerate(IDS):  # the same, slowly: every text is written from its beginning
        text, place, most = greedy(target, prompt, 12), len(prompt), len(prompt) + 12
        while is_right(idx, text) and place < len(text):
            step = [greedy(draft, text[:place], 1)[-1]]
            if step[0] == text[place]:
                place += 1
                continue
            while step[-1] not in ENDS and place + len(step) < most:
                step.append(greedy(draft, [*text[:place], *step], 1)[-1])
            head = [*text[:place], *step]
            trial = head if head[-1] == 0 else greedy(target, head, most - len(head))
            is_lost = not is_right(idx, trial)
            expected.append((idx, is_lost))
            longest = max(longest, len(step))
            text, place = (text, place + 1) if is_lost else (trial, place + len(step))
    found = sorted(zip(mined.prompt_idx.tolist(), mined.is_important.tolist(), strict=True))
    assert found == sorted(expected) and 0 < sum(label for _, label in found) < len(found) and longest > 2


def test_a_problem_that_the_target_gets_wrong_teaches_nothing(runners: tuple[RowRunner, RowRunner]) -> None:
    options: dict[str, Any] = {"answer_of": lambda *_: False, "max_tokens": 12, "end_ids": frozenset({0})}
    (outcome,) = StepMiner(*runners, step_ends=ENDS, **options).mine([(0, IDS[0])])
    assert outcome.is_important is None and outcome.is_last
    assert len(list(Miner(*runners, **options).mine([(0, IDS[0])]))) > 1


# ---- in an engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward of the tiny pair, for which every third token ends a step."""
    path = tmp_path_factory.mktemp("reward") / "reward.safetensors"
    return write_reward(path, pair.target, pair.draft, range(0, 4096, 3))


@pytest.mark.parametrize("params", [GREEDY, GREEDY.replace(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_a_reward_keeps_steps_of_the_draft_model_and_a_knob_of_0_none(
    pair: Pair, reward: str, params: SamplingParams
) -> None:
    texts = {}
    for name, own in (
        ("plain", {"method": "vanilla"}),
        ("none", {"method": "arbitrage", "reward": f"{reward}:0"}),
        ("usual", {"method": "arbitrage", "reward": reward}),
    ):
        draft = None if name == "plain" else pair.draft
        with LLM(pair.target, draft, dtype="float32", **own) as llm:
            outputs = llm.generate(PROMPTS, params)
        texts[name] = [output.outputs[0].token_ids for output in outputs]
        assert all(output.exact is (name != "usual") for output in outputs)
        assert (sum(output.stats.lenient_tokens for output in outputs) > 0) is (name == "usual")
    assert texts["plain"] == texts["none"] != texts["usual"]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_the_method(
    door: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "demo-reward.safetensors"
    if not file.exists():
        write_reward(file, DEMO_TARGET, DEMO_DRAFT, range(0, 1024, 3))
    setup = Setup(methods()["arbitrage"], DEMO_TARGET, DEMO_DRAFT, {"reward": f"{file}:1"})
    answer = DOORS[door](setup, REQUESTS["greedy"], tmp_path, capfd)
    assert not answer.refusal, answer.refusal
    assert answer.text != ""
    if answer.stats is not None:
        check_figures(answer.stats)
        assert answer.stats["is_exact"] is False


def test_the_line_of_figures_says_that_a_text_is_not_exact(
    pair: Pair, reward: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--reward", reward)
    ran = run_command(
        capfd, "generate", "the cat sat", "--method", "arbitrage", "--stats", "--max-tokens", "24", *asked
    )
    assert ran.status == 0 and "tokens against the target's choice" in ran.err and "not exact: " in ran.err


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "arbitrage"}, "method arbitrage needs a reward: give reward a file made with card train reward"),
        ({"method": "sps", "reward": "x.safetensors"}, "reward would do nothing: it is for method arbitrage"),
        ({"method": "arbitrage", "reward": "entropy:1"}, "a reward is a file of card train reward, .*got 'entropy:1'"),
        (
            {"method": "arbitrage", "reward": "{reward}:2"},
            "the knob of reward .* must be a number from 0 to 1, got '2'",
        ),
        ({"method": "arbitrage", "reward": "{reward}", "judge": "fly"}, "judge fly and reward .* both decide"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    settings: dict[str, str], reason: str, reward: str
) -> None:
    given = {name: value.format(reward=reward) for name, value in settings.items()}
    with pytest.raises(SettingsError, match=reason):
        LLM("/nowhere/target", "/nowhere/draft", **given)


def test_a_file_of_another_pair_is_refused(pair: Pair, reward: str) -> None:
    with pytest.raises(ModelError, match="the reward was trained for another pair: its draft model is draft"):
        LLM(pair.target, pair.target, method="arbitrage", reward=reward)
    with pytest.raises(ModelError, match=r"another pair: its target has width 32, this one 384; train one .* reward"):
        LLM(DEMO_TARGET, DEMO_DRAFT, method="arbitrage", reward=reward)


def test_a_damaged_file_is_refused(reward: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / "bad.safetensors", load_file(reward)
    facts = {"format": "card-reward-1", "draft": "draft", "bias": "0.0", "usual": "0.5"}
    without_ends = {name: one for name, one in arrays.items() if name != "ends"}
    for contents, told, reason in (
        (
            {**arrays, "weights": np.ones(31, np.float32)},
            facts,
            "damaged: it has weights of shape .31. for .* width 32",
        ),
        (without_ends, facts, "damaged: 'ends'"),
        (arrays, {**facts, "format": "card-judge-1"}, "is no reward .card-reward-1."),
        (arrays, {**facts, "bias": "much"}, "damaged"),
        (arrays, {**facts, "bias": "nan"}, "damaged: .* its bias nan; a knob is"),
        (arrays, {**facts, "usual": "7"}, "damaged: its usual knob is 7, its bias 0; a knob is from 0 to 1"),
        ({**arrays, "weights": arrays["weights"] * np.nan}, facts, "damaged: its weights has NaN or infinity; train"),
    ):
        save_file(contents, path, told)
        with pytest.raises(ModelError, match=reason):
            reward_verifier(str(path))
    path.write_bytes(Path(reward).read_bytes()[:-9])
    with pytest.raises(ModelError, match="is cut off or damaged"):
        reward_verifier(str(path))
    with pytest.raises(ModelError, match=r"there is no file .*; train a reward with card train reward"):
        reward_verifier("none.safetensors")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path) -> Callable[..., Ran]:
    """Run the command on problems."""
    rows = [json.dumps({"question": f"the cat {number}", "answer": f"#### {number}"}) for number in range(3)]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows))
    models = ("--target", pair.target, "--draft", pair.draft, "--max-tokens", "8")
    return partial(run_command, capfd, "train", "reward", *models, "--data", str(tmp_path / "problems.jsonl"))


def test_the_command_says_in_one_line_what_it_lacks(train: Callable[..., Ran], tmp_path: Path) -> None:
    for out, reason in (
        (tmp_path / "reward.txt", "must end in .safetensors"),
        (tmp_path / "no" / "reward.safetensors", "there is no folder"),
        (tmp_path / "reward.safetensors", "mismatches changed the answer, and a reward needs 5 that do"),
    ):
        ran = train("--out", str(out))
        assert ran.status == 2 and reason in ran.err and len(ran.err.splitlines()) == 1
    (tmp_path / "problems.jsonl").write_text('{"question": "How many?", "answer": "none"}')
    ran = train("--out", str(tmp_path / "reward.safetensors"))
    assert ran.status == 2 and "answer 1 has no number to check against" in ran.err and ran.err.count("\n") == 1


def test_a_training_that_was_cut_off_goes_on_and_generate_takes_its_file(
    train: Callable[..., Ran], pair: Pair, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, kept = tmp_path / "reward.safetensors", tmp_path / "reward.mined.jsonl"
    assert "a reward needs 5 that do" in train("--out", str(out)).err  # the tiny pair writes no numbers
    facts, *found = kept.read_text().splitlines()
    assert len(found) == 3
    labelled = []
    for number, line in enumerate(found):
        key, (answer_ids, _, label, states) = json.loads(line)
        labelled.append(json.dumps([key, [answer_ids, 0, label, states]]))
        for row in range(6):
            state = np.roll(np.arange(32, dtype=np.float32), 3 * number + row)
            place = row if row < 5 else len(answer_ids)
            outcome = [answer_ids, place, row % 2 == 0, base64.b64encode(state.tobytes()).decode()]
            labelled.append(json.dumps([f"{key.partition('.')[0]}.{row + 1}", outcome]))
    kept.write_text("\n".join([facts, *labelled, '["cut o']))
    ran = train("--out", str(out))
    assert ran.status == 0, ran.err
    assert "9 of 18 mismatches in 3 of 3 prompts with a drafted step lost the right answer" in ran.out
    assert out.is_file() and not kept.exists()
    asked = ("--target", pair.target, "--draft", pair.draft, "--dtype", "float32", "--reward", str(out))
    ran = run_command(capfd, "generate", "--json", "the cat", "--method", "arbitrage", "--max-tokens", "8", *asked)
    assert ran.status == 0 and json.loads(ran.out)["exact"] is False
