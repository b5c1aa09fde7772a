"""`card train eagle`: its head drafts as it was trained, is right more often than an untrained one, and goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from card import LLM, SamplingParams
from card.family.eagle import command as train_command
from card.family.eagle.head import EagleModule
from card.family.eagle.train_eagle import (
    EagleExamples,
    EagleTrainSettings,
    new_head,
    proposed_tokens,
    target_layers,
    train_eagle,
    unrolled,
)
from card.family.learning import target_texts
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.driver import TrainingTarget
from card.family.learning.head_training import TrainedHead
from card.family.learning.target_texts import KeptTexts, TargetTexts, write_texts
from card.models.block_loading import load_head
from card.models.features import FINAL
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import plain_runner
from tests.commands import Ran, run_command
from tests.own_head import NUM_LAYERS, right_head, save_target
from tests.state_drafting import Drafting
from tests.trainings import check_a_command_goes_on, check_a_head_goes_on, require_kept, stopping, write_lines

QUESTIONS = [{"question": f"how many {what}?"} for what in ("cats", "mats", "dogs", "the", "a")]
LEARNT = [[idx] for idx in range(3, 290, 12)]  # the target answers with the ids that follow
ASKED = [[idx, idx + 1] for idx in (40, 100, 200)]
MAX_TOKENS = 20
SETTINGS: dict[str, Any] = {"epochs": 20, "learning_rate": 5e-3, "num_tokens": 290, "mlp_width": 64}
LAYERS = (*target_layers(NUM_LAYERS), FINAL)


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(right_head("state"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(name: str) -> TrainingTarget:
    model = load_decoder(name, dtype="float32")
    runner = plain_runner(model, max_model_len=128)
    return TrainingTarget(name, load_tokenizer(name), model, runner, frozenset({0, 1}))


def written(target: TrainingTarget, kept: KeptTexts | None = None) -> TargetTexts:
    asked: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": MAX_TOKENS, "end_ids": target.end_ids}
    return write_texts(target.runner, LEARNT, layers=LAYERS, dtype=torch.bfloat16, whole=True, kept=kept, **asked)


@pytest.fixture(scope="module")
def texts(target: TrainingTarget) -> TargetTexts:
    return written(target)


def trained(
    target: TrainingTarget, texts: TargetTexts, folder: Path, *, stop_after: int | None = None, **changes: Any
) -> TrainedHead[EagleModule]:
    settings = EagleTrainSettings(**{**SETTINGS, "checkpoint_steps": 7, **changes})
    checkpoint = Checkpoint(folder / "training.pt", {})
    return train_eagle(target, texts, settings, checkpoint=checkpoint, on_step=stopping(stop_after))


@pytest.fixture(scope="module")
def done(
    target: TrainingTarget, texts: TargetTexts, tmp_path_factory: pytest.TempPathFactory
) -> TrainedHead[EagleModule]:
    return trained(target, texts, tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def folder(done: TrainedHead[EagleModule], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("head") / "learnt"
    done.head.save(path, done.figures())
    return str(path)


def answers(name: str, draft: str | None, temperature: float = 0.0) -> tuple[list[Any], float]:
    """Return the texts after some prompts, and the tokens that a verification has accepted."""
    drafted: dict[str, Any] = {"method": "vanilla"}
    if draft is not None:
        drafted = {"draft": draft, "method": "sps", "placement": "inline", "num_speculative_tokens": 4}
    with LLM(name, dtype="float32", max_model_len=128, policy="fixed", **drafted) as llm:
        outputs = llm.generate(ASKED, SamplingParams(temperature=temperature, seed=3, max_tokens=MAX_TOKENS))
    found = [one.outputs[0].token_ids for one in outputs]
    return found, sum(one.stats.mean_acceptance_length for one in outputs) / len(outputs) - 1


def test_texts_are_those_of_plain_decoding_and_learning_raises_what_is_accepted(
    name: str, target: TrainingTarget, texts: TargetTexts, folder: str, tmp_path: Path
) -> None:
    new_head(target, texts, EagleTrainSettings(**SETTINGS)).save(tmp_path / "new", {})
    plain, _ = answers(name, None)
    (of_new, new), (of_learnt, learnt) = (answers(name, draft) for draft in (str(tmp_path / "new"), folder))
    assert of_new == of_learnt == plain
    assert learnt > new + 1, "of four"
    assert answers(name, folder, 1.0)[0] == answers(name, None, 1.0)[0]


def test_the_passes_of_a_draft_give_the_numbers_of_the_training(
    name: str, texts: TargetTexts, target: TrainingTarget, done: TrainedHead[EagleModule], folder: str
) -> None:
    drafting = Drafting(
        name, lambda runner, _: load_head(folder, runner, dtype="float32", cache_dir=""), right_head("state")
    )
    idx = 5
    text = [*LEARNT[idx], *texts.token_ids[texts.text(idx)].tolist()]
    label_of = torch.arange(done.head.sizes.vocab_size)
    batch = EagleExamples(texts, [idx], target.runner.embeddings, label_of).batch(torch.tensor([0]))
    sequence = drafting.open(text[:-3])
    drafting.show(sequence, text[:-3])
    sequence.commit([text[-3]])
    drafting.step(sequence)
    with torch.no_grad():
        expected = done.head.logits(next(unrolled(done.head, batch, 1))[0, -3])
    found = torch.tensor(drafting.passes[-1][0][0][-1])[done.head.token_ids]
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)  # states were kept in 16 bits


def test_the_folder_has_the_keys_of_published_heads(folder: str, done: TrainedHead[EagleModule]) -> None:
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["format"] == "pt"
    of_layer = [f"self_attn.{one}_proj" for one in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    of_layer += ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    whole = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors.keys() == whole | {f"midlayer.{one}.weight" for one in of_layer}
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(ids, done.head.token_ids) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert config["draft_vocab_size"] == len(ids) == 290 and tensors["d2t"].dtype == torch.int64


def test_proposed_tokens_are_the_ends_those_of_the_answers_by_count_and_then_others(
    target: TrainingTarget, texts: TargetTexts
) -> None:
    vocab_size = target.runner.vocab_size
    ranked = [set(proposed_tokens(texts, target.tokenizer, count, vocab_size).tolist()) for count in (2, 60, 290, 999)]
    counts = texts.token_ids.bincount(minlength=vocab_size)
    assert ranked[0] == {0, 1}
    assert min(counts[list(ranked[1] - {0, 1})]) >= max(
        counts[[one for one in range(vocab_size) if one not in ranked[1]]]
    )
    assert ranked[0] < ranked[1] < ranked[2] < ranked[3] == set(range(vocab_size))


def test_answers_that_were_kept_are_not_written_again(
    target: TrainingTarget, texts: TargetTexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_texts, "BATCH", 4)
    forward, num_passes = target.runner.forward, [0]

    def cut_off(extensions: Any) -> Any:
        num_passes[0] += 1
        if num_passes[0] == 2 * MAX_TOKENS + 5:
            raise InterruptedError
        return forward(extensions)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(target.runner, "forward", cut_off)
        written(target, KeptTexts(tmp_path / "texts", "greedy"))
    assert sum(map(len, KeptTexts(tmp_path / "texts", "greedy").load())) == 8
    gone_on = written(target, KeptTexts(tmp_path / "texts", "greedy"))
    assert gone_on.digest == texts.digest
    monkeypatch.setattr(target_texts, "written_texts", require_kept)
    assert written(target, KeptTexts(tmp_path / "texts", "greedy")).digest == texts.digest
    assert not KeptTexts(tmp_path / "texts", "sampled").load() and not list((tmp_path / "texts").iterdir())


def test_a_training_that_was_cut_off_ends_with_the_same_weights(
    target: TrainingTarget, texts: TargetTexts, tmp_path: Path
) -> None:
    check_a_head_goes_on(partial(trained, target, texts, epochs=4), tmp_path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""
    return partial(run_command, capfd, "train", "eagle")


def test_a_head_is_written_and_a_cut_off_command_goes_on(run: Any, name: str, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "texts.jsonl", QUESTIONS)
    out = tmp_path / "head"
    args = ("--target", name, "--data", data, "--max-tokens", "12", "--draft-vocab", "100", "--out")
    ran = run(*args, str(out))
    assert (ran.status, ran.err) == (0, "")
    assert re.search(r"[\d.]+ tokens a target pass with 5 candidates, on texts that it did not learn from", ran.out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "texts.jsonl"], "no traces"
    check_a_command_goes_on(run, args, out, (train_command, "train_eagle"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--out", "{folder}/old"], "is there already; choose another name, or delete it"),
        (["--out", "{folder}/head", "--max-prompts", "1"], "1 answers have two tokens or more"),
        (["--out", "{folder}/head", "--draft-vocab", "0"], "--draft-vocab must be a whole number of 1 or more, got 0"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(run: Any, name: str, tmp_path: Path, args: list[str], said: str):
    (tmp_path / "old").mkdir()
    data = write_lines(tmp_path / "texts.jsonl", QUESTIONS)
    ran = run("--target", name, "--data", data, *(one.format(folder=tmp_path) for one in args))
    assert ran.status == 2
    assert said in ran.err and "Traceback" not in ran.err


def test_a_target_outside_our_own_pass_is_refused(run: Any, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(train_command, "ExactRunner", int)
    data = write_lines(tmp_path / "texts.jsonl", QUESTIONS)
    ran = run("--target", name, "--data", data, "--out", str(tmp_path / "head"))
    assert ran.status == 2
    assert "a head drafts for targets that run in our own pass" in ran.err
