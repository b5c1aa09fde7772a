"""AutoJudge: what mining finds, what training makes of it, and that its file is taken for its own pair alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from card import LLM, SamplingParams
from card.backends.transformers.loading import load_model
from card.errors import ModelError, PromptError
from card.family.judges import mining
from card.family.judges.auto import AUTO_WISH, AutoJudge, PairFacts
from card.family.judges.choosing import verifier_of
from card.family.judges.mining import Miner, Mismatches
from card.family.judges.train_judge import train_judge
from card.family.learning.regression import area_range, area_under_roc, fit_ridge
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import make_runner
from tests.commands import Ran, run_command
from tests.pair import Pair
from tests.tiny import tiny_llama

VOCAB = 40
STATE = np.ones(32, dtype=np.float32)  # as wide as the tiny target's
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def runner(seed: int, noise: float = 0.0) -> RowRunner:
    return make_runner(tiny_llama(VOCAB, seed=seed, noise=noise), max_model_len=64)


@pytest.fixture(scope="module")
def models() -> tuple[RowRunner, RowRunner]:
    return runner(3), runner(3, noise=0.15)


def miner(models: tuple[RowRunner, RowRunner], answer_of: Callable[[int, Sequence[int]], object]) -> Miner:
    return Miner(*models, answer_of=answer_of, max_tokens=12, end_ids=frozenset({0}))


PROMPTS = [[5, 9, 2], [7, 1], [11, 12, 13, 14], [30, 2, 8]]


def mine(one: Miner) -> Mismatches:
    return Mismatches.joined(list(one.mine(list(enumerate(PROMPTS)))))


def greedy(target: RowRunner, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return a text and what plain decoding adds to it: up to token 0, or so many tokens."""
    ids, slot = list(token_ids), target.open(64)
    while num_tokens and not (len(ids) > len(token_ids) and ids[-1] == 0):
        first = target.num_rows(slot)
        (logits,) = target.forward([Extension(slot, ids[first:], range(first - 1, len(ids) - 1), len(ids) - first - 1)])
        ids.append(int(logits[0].argmax()))
        num_tokens -= 1
    target.close(slot)
    return ids


def test_mining_labels_each_mismatch_by_the_answer_that_follows_from_it(
    models: tuple[RowRunner, RowRunner],
) -> None:
    target, draft = models
    mined = mine(miner(models, lambda _, ids: ids[-1] % 2))
    expected = []
    for idx, prompt in enumerate(PROMPTS):  # the same, slowly: every text is written from its beginning
        text, place = greedy(target, prompt, 12), len(prompt)
        answer = text[-1] % 2
        while place < len(text):
            guess = greedy(draft, text[:place], 1)[-1]
            if guess != text[place]:
                head = [*text[:place], guess]
                trial = head if guess == 0 else greedy(target, head, 12 - (len(head) - len(prompt)))
                expected.append((idx, trial[-1] % 2 != answer))
                text = text if expected[-1][1] else trial
            place += 1
    found = sorted(zip(mined.prompt_idx.tolist(), mined.is_important.tolist(), strict=True))
    assert found == sorted(expected) and 0 < sum(label for _, label in found) < len(found)
    assert mined.features.shape == (len(mined), 32)


def test_prompts_that_wait_for_others_have_the_same_mismatches(
    models: tuple[RowRunner, RowRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = mine(miner(models, lambda _, ids: ids[-1] % 2))
    monkeypatch.setattr(mining, "AT_ONCE", 1)
    alone = mine(miner(models, lambda _, ids: ids[-1] % 2))
    assert torch.equal(alone.is_important, together.is_important) and torch.equal(alone.prompt_idx, together.prompt_idx)
    torch.testing.assert_close(alone.features, together.features)


@pytest.mark.parametrize("num_passes", [1, 12, 40])
def test_mining_that_runs_out_of_time_goes_on_from_what_was_tried(
    models: tuple[RowRunner, RowRunner], num_passes: int
) -> None:
    one, prompts = miner(models, lambda _, ids: ids[-1] % 2), list(enumerate(PROMPTS))
    whole = mine(one)
    passes = iter(range(num_passes))
    part = list(one.mine(prompts, lambda: next(passes, None) is None))
    assert (len(Mismatches.joined(part)) > 0) == (num_passes > 12) and len(Mismatches.joined(part)) < len(whole)
    rest = list(one.mine(prompts, earlier={found.prompt_idx: found for found in part}))
    joined = Mismatches.joined([*part, *rest])
    assert torch.equal(joined.is_important, whole.is_important) and torch.equal(joined.prompt_idx, whole.prompt_idx)
    torch.testing.assert_close(joined.features, whole.features)
    ended = [found.prompt_idx for found in [*part, *rest] if found.is_last]
    assert sorted(ended) == list(range(len(PROMPTS))), "each prompt ends once"
    done = {found.prompt_idx: found for found in [*part, *rest] if found.is_last}
    assert not list(one.mine(prompts, earlier=done)), "nothing is left"


def test_nothing_is_important_if_all_answers_are_the_same(models: tuple[RowRunner, RowRunner]) -> None:
    mined = mine(miner(models, lambda _, ids: None))
    assert len(mined) and not mined.is_important.any()
    with pytest.raises(PromptError, match=r"0 of .* mismatches changed the answer, and a judge needs 5 that do"):
        train_judge(mined, PairFacts.of(models[0], "draft"))


def separable(count: int = 200) -> Mismatches:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn((count, 8), generator=generator) * 3 + 1
    return Mismatches(states, states[:, 2] + 0.1 * states[:, 5] > 1, torch.arange(count) // 4)


def test_training_learns_what_the_states_tell_and_nothing_where_they_tell_nothing() -> None:
    mined, pair = separable(), PairFacts("draft", torch.ones(64))
    trained = train_judge(mined, pair)
    assert trained.area > 0.95 and 0.0 < trained.judge.usual < 1.0 and trained.kept_share > 0.8
    shuffled = mined.is_important[torch.randperm(200, generator=torch.Generator().manual_seed(1))]
    noise = train_judge(Mismatches(mined.features, shuffled, mined.prompt_idx), pair)
    assert 0.35 < noise.area < 0.7 and noise.kept_share < 0.5


def test_the_fit_has_no_slope_left() -> None:
    mined = separable()
    weights, bias = fit_ridge(mined.features.double(), mined.is_important, 1.0)
    chances = (mined.features.double() @ weights + bias).sigmoid()
    assert abs(float((chances - mined.is_important.double()).sum())) < 1e-3  # the bias is free


def test_a_fit_of_fewer_examples_than_inputs_has_no_slope_left_either() -> None:
    states = torch.randn((20, 50), generator=torch.Generator().manual_seed(0)).double() * 3 + 1
    labels = states[:, 2] > 1
    weights, bias = fit_ridge(states, labels, 2.0)
    std = states.std(0, correction=0)
    wrong = (states @ weights + bias).sigmoid() - labels.double()
    slope = ((states - states.mean(0)) / std).T @ wrong + 2.0 * weights * std  # the weights of standardised inputs
    assert float(slope.abs().max()) < 1e-6 and float(weights.abs().max()) > 0.01


def test_the_area_under_the_curve_counts_pairs_in_the_right_order() -> None:
    labels = torch.tensor([True, False, True, False])
    assert area_under_roc(torch.tensor([3.0, 2.0, 1.0, 1.0]), labels) == 0.625


def test_the_range_of_the_area_holds_it_and_counts_prompts_and_not_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2 == 0
    scores = torch.randn(400, generator=generator) + labels
    area = area_under_roc(scores, labels)
    low, high = area_range(scores, labels, torch.arange(400) // 2)
    assert low < area < high and 0.05 < high - low < 0.15
    assert area_range(scores, labels, torch.arange(400) // 2) == (low, high)
    alike = area_range(scores.repeat(4), labels.repeat(4), torch.arange(1600) % 400)
    assert alike[1] - alike[0] == pytest.approx(high - low, rel=0.3), "copies of an example tell nothing new"


@pytest.fixture(scope="module")
def judge_file(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A judge of the tiny pair, whose weights are random: what it tolerates is a matter of chance."""
    target = make_runner(load_model(pair.target, dtype="float32"), max_model_len=64)
    weights = torch.randn(32, generator=torch.Generator().manual_seed(2)).numpy()
    path = tmp_path_factory.mktemp("judge") / "judge.safetensors"
    AutoJudge(weights, 0.0, usual=0.6, pair=PairFacts.of(target, pair.draft), knob=None).save(path)
    return str(path)


def test_a_saved_judge_is_the_same_one(judge_file: str) -> None:
    judge = AutoJudge.load(judge_file)
    assert (judge.knob, AutoJudge.load(judge_file, 0.2).knob, judge.pair.draft) == (0.6, 0.2, "draft")
    again = Path(judge_file).with_name("again.safetensors")
    judge.save(again, {"area_under_roc": "0.7"})
    state = np.arange(32, dtype=np.float32) / 32
    assert AutoJudge.load(again).importance(state) == judge.importance(state)


def test_a_judge_keeps_candidates_by_the_state_at_the_drafts_token(pair: Pair, judge_file: str) -> None:
    models = {"target": pair.target, "draft": pair.draft, "method": "sps", "dtype": "float32", "policy": "fixed"}
    prompts = ["the cat sat", "one two three"]
    with LLM(**models) as llm:
        exact = [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]
        assert not llm.host.runner.features.layers  # without a judge a pass keeps no states
    with LLM(**models, judge=judge_file) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert llm.host.runner.features.layers == {AUTO_WISH.layers[0]}
    assert sum(output.stats.lenient_tokens for output in outputs) > 0
    assert not any(output.exact for output in outputs)
    for params in (GREEDY, GREEDY.replace(temperature=1.0, seed=3)):
        texts = []
        for judge in (f"{judge_file}:0", None):
            with LLM(**models, judge=judge) as llm:
                texts.append([tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params)])
                assert llm.is_exact
        assert texts[0] == texts[1]
        assert params is not GREEDY or texts[0] == exact


def test_a_judge_of_another_pair_is_refused(pair: Pair, judge_file: str) -> None:
    with pytest.raises(
        ModelError, match="another pair: its draft model is draft, this one target; train one for this pair"
    ):
        LLM(pair.target, pair.target, method="sps", judge=judge_file)
    with pytest.raises(ModelError, match="another pair: its target has width 32, this one 384"):
        LLM("demo-target", "demo-draft", method="sps", judge=judge_file)
    mine, theirs = PairFacts.of(runner(3), "draft"), PairFacts.of(runner(4), "draft")
    assert mine.difference(theirs) == "the embeddings of its target are others"
    assert mine.difference(PairFacts("", mine.probe)) == ""  # a draft model elsewhere, whose name nobody knows


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "there is no file .*; train a judge with card train judge"), (b"x", "is cut off")]
)
def test_a_file_that_is_no_judge_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "judge.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        verifier_of(str(path))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    return partial(run_command, capfd, "train", "judge")


def test_the_command_says_in_one_line_what_it_lacks(run: Callable[..., Ran], pair: Pair, tmp_path: Path) -> None:
    models = ("--target", pair.target, "--draft", pair.draft, "--max-tokens", "8", "--max-prompts", "2")
    for out, reason in (
        (tmp_path / "judge.txt", "must end in .safetensors"),
        (tmp_path / "no" / "judge.safetensors", "there is no folder"),
        (tmp_path / "judge.safetensors", "mismatches changed the answer, and a judge needs 5 that do"),
    ):
        ran = run(*models, "--out", str(out))
        assert ran.status == 2 and reason in ran.err and len(ran.err.splitlines()) == 1


def test_a_training_that_was_cut_off_goes_on(run: Callable[..., Ran], pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the cat sat\none two three\nthe mat there\nthree two one\nother cat\n")
    out, kept = tmp_path / "judge.safetensors", tmp_path / "judge.mined.jsonl"
    command = ["--target", pair.target, "--draft", pair.draft, "--prompts", str(tmp_path / "prompts.txt")]
    command += ["--out", str(out), "--max-tokens"]
    assert "a judge needs 5 that do" in run(*command, "8", "--max-prompts", "3").err  # the tiny pair writes no numbers
    facts, *found = kept.read_text().splitlines()
    tried = [json.loads(line) for line in found]
    assert len({key.partition(".")[0] for key, _ in tried}) == 3
    last = next(idx for idx, (_, outcome) in enumerate(tried) if outcome[2] is not None)
    relabelled = [
        json.dumps([key, [ids, place, None if label is None else idx % 2 == 0, states]])
        for idx, (key, (ids, place, label, states)) in enumerate(tried)
    ]
    kept.write_text("\n".join([facts, *relabelled, '["cut o']))
    for tokens, reason in (("9", "of another run: its max_tokens differs"), ("8", "")):
        ran = run(*command, tokens)
        assert (ran.status == 2) == bool(reason) and reason in ran.err and len(ran.err.splitlines()) <= 1
    assert "in 5 of 5 prompts changed the final number" in ran.out and out.is_file()  # those that were kept, too
    assert not kept.exists()
    other_width, not_finite = [base64.b64encode(state.tobytes()).decode() for state in (STATE[:31], STATE * np.inf)]
    states = [[[1, 2], 1, True, state] for state in ("!", other_width, not_finite)]
    for damage in (3, [[1], 2, None, None], *states):
        kept.write_text("\n".join([facts, json.dumps([tried[last][0].partition(".")[0] + ".0", damage])]) + "\n")
        ran = run(*command, "8")
        assert ran.status == 2 and "is damaged" in ran.err and len(ran.err.splitlines()) == 1
