"""A drafting head: it learns by either loss, goes on bit by bit where it was cut off, and refuses other targets."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from card import LLM, RequestOutput, SamplingParams
from card.backends.transformers.arrays import as_tensor
from card.backends.transformers.loading import load_model
from card.cli.parts.stats_line import accepted_in_words
from card.drafting.local.protocol import Observation
from card.engine.metrics import RequestStats
from card.errors import ModelError, PromptError, SettingsError
from card.family.ctc.head import SlotHead
from card.family.ctc.losses import LOSSES
from card.family.ctc.slots import Slots, inputs_of
from card.family.ctc.train_ctc import CtcTrainSettings, SlotExamples, accepted_by_depth, train_head
from card.family.ctc.writer import CtcSequence
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.head_training import TrainedHead
from card.family.learning.target_texts import KeptTexts, TargetTexts, write_texts
from card.models.loading import load_decoder
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.hidden_states import KINDS, make_model, make_runner, own_features
from tests.pair import Pair
from tests.pair import make_model as make_pair_model
from tests.trainings import check_a_head_goes_on, stopping

PROMPTS = [[(7 * start + step * i) % 250 + 2 for i in range(5)] for start in range(8) for step in (1, 3)]
MAX_TOKENS = 24
LABEL_OF = torch.zeros(0)  # of training alone


def settings_of(**changes: Any) -> CtcTrainSettings:
    values = {"num_slots": 4, "num_labels": 3, "window": 3, "width": 32, "batch_size": 64, "epochs": 12}
    return CtcTrainSettings(**values | {"learning_rate": 1e-2, "checkpoint_steps": 7} | changes)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.fixture(scope="module")
def other_target(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model of the target's sizes with other weights, and the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(pair.target, folder, dirs_exist_ok=True)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    make_pair_model(vocab_size, noise=1.0).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(pair: Pair) -> RowRunner:
    return plain_runner(load_decoder(pair.target, dtype="float32"), max_model_len=128)


@pytest.fixture(scope="module")
def texts(target: RowRunner) -> TargetTexts:
    return write_texts(target, PROMPTS, temperature=0.0, seed=0, max_tokens=MAX_TOKENS, end_ids=frozenset({0, 1}))


def trained(
    target: RowRunner, texts: TargetTexts, folder: Path, *, stop_after: int | None = None, **changes: Any
) -> TrainedHead[SlotHead]:
    checkpoint = Checkpoint(folder / "training.pt", {"target": changes.pop("name", "tiny")})
    return train_head(target, texts, settings_of(**changes), checkpoint=checkpoint, on_step=stopping(stop_after))


@pytest.fixture(scope="module")
def head_file(target: RowRunner, texts: TargetTexts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    done = trained(target, texts, folder)
    done.head.save(folder / "head.safetensors", done.figures())
    return folder / "head.safetensors"


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_texts_are_the_targets_own_with_the_hidden_state_that_each_token_was_chosen_from() -> None:
    for kind in KINDS:
        runner = make_runner(kind)
        texts = write_texts(runner, [[3, 1, 4], [1, 5]], temperature=0.0, seed=0, max_tokens=6, end_ids=frozenset())
        assert texts.starts.tolist() == [0, 6, 12]
        whole = [1, 5, *texts.token_ids[6:].tolist()]
        expected = own_features(whole, 1)[1:-1]
        torch.testing.assert_close(texts.features[6:].clone(), expected, atol=5e-4, rtol=5e-4)
        with torch.no_grad():
            assert make_model()(torch.tensor([whole])).logits[0, 1:-1].argmax(-1).tolist() == whole[2:]


def test_sampled_texts_follow_from_the_seed_alone(target: RowRunner) -> None:
    first, again, other = (
        write_texts(target, PROMPTS[:3], temperature=1.0, seed=seed, max_tokens=8, end_ids=frozenset())
        for seed in (5, 5, 6)
    )
    assert first.digest == again.digest != other.digest


def test_kept_texts_are_read_back_unless_they_came_to_be_otherwise(texts: TargetTexts, tmp_path: Path) -> None:
    kept = KeptTexts(tmp_path / "texts", "greedy")
    kept.add(texts)
    (found,) = kept.load()
    assert found.digest == texts.digest
    (file,) = (tmp_path / "texts").iterdir()
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelError, match="cut off or damaged; delete it"):
        kept.load()


def test_a_head_reads_the_rows_up_to_its_own_and_learns_what_follows(texts: TargetTexts) -> None:
    embeddings = torch.randn(texts.features.shape)
    examples = SlotExamples(texts, range(len(texts)), embeddings, 3, LABEL_OF)
    some = torch.arange(len(examples))
    inputs, is_there = examples.inputs(some)
    token_ids, counts = examples.labels(some, 4)
    seen = 0
    for idx in range(len(texts)):
        place = texts.text(idx)
        own = texts.token_ids[place].tolist()
        for row in range(len(own) - 1):
            assert is_there[seen].tolist() == [row >= 2, row >= 1, True]
            half = torch.nn.functional.rms_norm(embeddings[place][row], (embeddings.shape[1],), eps=1e-6)
            torch.testing.assert_close(inputs[seen, -1, embeddings.shape[1] :], half)
            assert token_ids[seen, : counts[seen]].tolist() == own[row + 1 : row + 5]
            seen += 1
    assert seen == len(examples)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_a_training_learns_the_targets_text(target: RowRunner, texts: TargetTexts, tmp_path: Path, loss: Any) -> None:
    done = trained(target, texts, tmp_path, loss=loss, epochs=20)
    assert done.losses[-1] < 0.5 * done.losses[0]
    embeddings = as_tensor(target.embeddings(texts.token_ids.tolist()))
    everything = SlotExamples(texts, range(len(texts)), embeddings, 3, LABEL_OF)
    accepted = accepted_by_depth(done.head, everything, num_candidates=8)
    assert accepted[0] > 0.5
    assert list(accepted) == sorted(accepted, reverse=True)


def test_both_losses_train_heads_of_equal_size_on_equal_steps(
    target: RowRunner, texts: TargetTexts, tmp_path: Path
) -> None:
    runs = [
        trained(target, texts, tmp_path / loss, loss=loss, epochs=1) for loss in LOSSES if not (tmp_path / loss).mkdir()
    ]
    assert runs[0].head.num_weights == runs[1].head.num_weights
    assert len(runs[0].losses) == len(runs[1].losses) and runs[0].num_trained == runs[1].num_trained


def test_a_training_that_goes_on_ends_with_the_weights_of_one_run(
    target: RowRunner, texts: TargetTexts, tmp_path: Path
) -> None:
    check_a_head_goes_on(partial(trained, target, texts), tmp_path)


def test_a_checkpoint_of_another_run_is_refused_by_name(target: RowRunner, texts: TargetTexts, tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):
        trained(target, texts, tmp_path, stop_after=8)
    with pytest.raises(ModelError, match='is of another run: its loss is "ctc", not "cross-entropy"'):
        trained(target, texts, tmp_path, loss="cross-entropy")
    with pytest.raises(ModelError, match='its target is "tiny", not "other"'):
        trained(target, texts, tmp_path, name="other")
    file = tmp_path / "training.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"training\.pt is cut off or damaged"):
        trained(target, texts, tmp_path)


def test_one_text_is_too_few(target: RowRunner, tmp_path: Path) -> None:
    texts = write_texts(target, PROMPTS[:1], temperature=0.0, seed=0, max_tokens=4, end_ids=frozenset())
    with pytest.raises(PromptError, match="1 answers have two tokens or more; give 2 prompts"):
        trained(target, texts, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("loss", "l2"), ("num_slots", 0), ("num_labels", 5), ("window", 0), ("batch_size", 0)]
)
def test_a_setting_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be"):
        settings_of(**{name: value})


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_saved_head_is_the_same_one(target: RowRunner, head_file: Path) -> None:
    head = SlotHead.load(head_file)
    again = head_file.with_name("again.safetensors")
    head.save(again)
    other = SlotHead.load(again)
    assert head.facts == other.facts and torch.equal(head.token_ids, other.token_ids)
    inputs, is_there = torch.randn(2, 3, 64), torch.ones(2, 3, dtype=torch.bool)
    for one in (head, other):
        one.attach(target)
    torch.testing.assert_close(head(inputs, is_there), other(inputs, is_there), atol=0, rtol=0)


def test_a_file_that_is_missing_cut_off_or_no_head_is_refused_in_one_line(head_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*none; train a head with card train ctc"):
        Slots.load(tmp_path / "none")
    cut = tmp_path / "cut"
    for size in (10, 1000, head_file.stat().st_size - 8):
        cut.write_bytes(head_file.read_bytes()[:size])
        with pytest.raises(ModelError, match="cut is cut off or damaged") as caught:
            Slots.load(cut)
        assert "\n" not in str(caught.value)


def test_a_head_of_another_target_is_refused_by_name(head_file: Path, pair: Pair, other_target: str) -> None:
    head = Slots.load(head_file)
    for folder, said in (
        (pair.foreign_draft, "its vocabulary has 299 tokens, this one 270"),
        (other_target, "the embeddings of its target are others"),
    ):
        other = plain_runner(load_decoder(folder, dtype="float32"), max_model_len=64)
        with pytest.raises(ModelError, match=f"head.safetensors was trained for another target: {said}"):
            head.attach(other, str(head_file))


# ---- the method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_what_drafts_computes_what_was_trained(
    target: RowRunner, texts: TargetTexts, tmp_path: Path, loss: Any
) -> None:
    head = trained(target, texts, tmp_path, loss=loss, epochs=1, width=128).head
    head.save(tmp_path / "head.safetensors")
    slots = Slots.load(tmp_path / "head.safetensors")
    slots.attach(target, "the head")
    inputs = torch.randn(3, 3, 64, generator=torch.Generator().manual_seed(0))
    is_there = torch.tensor([[False, False, True], [False, True, True], [True, True, True]])
    with torch.no_grad():
        logits = head(inputs, is_there)
    expected = logits.log_softmax(-1)
    if loss != "ctc":
        expected = torch.nn.functional.pad(logits[..., :-1].log_softmax(-1), (0, 1), value=-torch.inf)
    for one in (slots, head.running()):
        np.testing.assert_allclose(one.logprobs(inputs.numpy(), is_there.numpy()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 8])
def test_method_ctc_writes_the_text_of_plain_decoding(
    pair: Pair, head_file: Path, temperature: float, count: int
) -> None:
    prompts = PROMPTS[:count]
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=MAX_TOKENS)
    with LLM(pair.target, dtype="float32", method="vanilla") as plain:
        expected = plain.generate(prompts, params)
    with LLM(pair.target, method="ctc", ctc=str(head_file), dtype="float32", policy="fixed") as llm:
        outputs = llm.generate(prompts, params)
    assert ids_of(outputs) == ids_of(expected)
    assert all(one.exact for one in outputs)
    if temperature == 0.0:
        assert sum(one.stats.accepted_by_writer.get("ctc", 0) for one in outputs) > 0


def test_the_head_reads_in_the_engine_what_it_reads_in_training(
    pair: Pair, target: RowRunner, head_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Any]] = []  # after each pass: new tokens, and the window
    full = CtcSequence.observe

    def observe(self: CtcSequence, found: Observation) -> None:
        full(self, found)
        seen.append((len(found.new_ids), self.window.copy()))

    monkeypatch.setattr(CtcSequence, "observe", observe)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(pair.target, method="ctc", ctc=str(head_file), dtype="float32", policy="fixed") as llm:
        (output,) = llm.generate(PROMPTS[:1], params)
    text = [*PROMPTS[0], *output.outputs[0].token_ids]
    hidden = own_features(text, 1, load_model(pair.target, dtype="float32"))
    assert max(count for count, _ in seen) > 1, "some candidates were accepted"
    end = len(PROMPTS[0])
    for count, window in seen[:-1]:  # the last pass may have been cut
        end += count
        first = max(len(PROMPTS[0]), end - 3)
        expected = inputs_of(hidden[first - 1 : end - 1].numpy(), target.embeddings(text[first:end]))
        np.testing.assert_allclose(window, expected, atol=1e-3, rtol=1e-3)


def test_the_head_writes_beside_a_draft_model(pair: Pair, head_file: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    models = {"target": pair.target, "dtype": "float32"}
    with LLM(**models, method="vanilla") as plain:
        expected = plain.generate(PROMPTS[:2], params)
    with LLM(
        **models, draft=pair.draft, method="sps", writers=("beam", "ctc"), ctc=str(head_file), placement="inline"
    ) as llm:
        outputs = llm.generate(PROMPTS[:2], params)
    assert ids_of(outputs) == ids_of(expected)
    assert any("ctc" in name for one in outputs for name in one.stats.verified_by_writer)


def test_without_a_head_or_with_another_targets_the_method_is_refused(
    pair: Pair, head_file: Path, other_target: str
) -> None:
    with pytest.raises(SettingsError, match="the writer ctc needs a head: give ctc a file"):
        LLM(pair.target, method="ctc")
    with pytest.raises(ModelError, match=r"head\.safetensors was trained for another target"):
        LLM(other_target, method="ctc", ctc=str(head_file))


def test_what_it_wrote_is_not_told_as_copied() -> None:
    stats = RequestStats(accepted_by_writer={"ctc": 2}, accepted_tokens=2)
    assert accepted_in_words(stats) == "accepted 2: 100% of other writers (ctc 2)"
