"""A drafter fused with the states of a target that sees: it learns, goes on bit by bit, and never changes a text."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from card import LLM, RequestOutput, SamplingParams
from card.api.prompts import PromptReader
from card.cli.parts.stats_line import accepted_in_words
from card.config import EngineSettings
from card.drafting.local.protocol import Observation
from card.engine.metrics import RequestStats
from card.errors import ModelError, SettingsError
from card.family.hivis.drafting import BEAM_WIDTH, TextMemory, draft
from card.family.hivis.fused import Fused
from card.family.hivis.head import FusedHead
from card.family.hivis.train_hivis import FusedExamples, HivisTrainSettings, train_fused, unrolled
from card.family.hivis.writer import HivisSequence
from card.family.learning.array_head import scaled_rows
from card.family.learning.bound_module import scaled
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.head_training import IGNORED, TrainedHead, common_tokens
from card.family.learning.target_texts import TargetTexts, write_texts
from card.models.images import ImagePrompt
from card.models.loading import load_decoder, load_tokenizer
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.theirs.transformers.arrays import as_tensor
from card.tree.nodes import ROOT
from tests.pair import Pair
from tests.seeing import asked, picture, processor_of, save_seeing
from tests.trainings import check_a_head_goes_on, stopping

MAX_TOKENS = 24
PICTURES = [picture(seed) for seed in range(4)]
CONVERSATIONS = [
    asked(word, *PICTURES[start : start + count])
    for start, (word, count) in enumerate(product(("cat", "mat", "six", "dogs"), (1, 2, 0)))
]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module", autouse=True)
def model(seeing: str) -> Any:
    """Save the target; return it as transformers has it."""
    return save_seeing("llava", Path(seeing))


@pytest.fixture(scope="module")
def target(seeing: str) -> RowRunner:
    return plain_runner(load_decoder(seeing, dtype="float32"), max_model_len=256)


@pytest.fixture(scope="module")
def prompts(seeing: str, target: RowRunner) -> list[Any]:
    settings = EngineSettings(max_images=2)
    reader = PromptReader.for_target(load_tokenizer(seeing), settings, seeing, target, target.dtype)
    return [reader.encode(one) for one in CONVERSATIONS]


@pytest.fixture(scope="module")
def texts(target: RowRunner, prompts: list[Any]) -> TargetTexts:
    return write_texts(
        target, prompts, temperature=0.0, seed=0, max_tokens=MAX_TOKENS, end_ids=frozenset({0, 1}), whole=True
    )


def trained(
    target: RowRunner, texts: TargetTexts, folder: Path, *, stop_after: int | None = None, **changes: Any
) -> TrainedHead[FusedHead]:
    values = {"num_steps": 3, "width": 32, "batch_size": 4, "epochs": 30, "learning_rate": 1e-2, "checkpoint_steps": 7}
    checkpoint = Checkpoint(folder / "training.pt", {})
    return train_fused(
        target, texts, HivisTrainSettings(**values | changes), checkpoint=checkpoint, on_step=stopping(stop_after)
    )


@pytest.fixture(scope="module")
def done(target: RowRunner, texts: TargetTexts, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead[FusedHead]:
    return trained(target, texts, tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def file(done: TrainedHead[FusedHead], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("drafter") / "drafter.safetensors"
    done.head.save(path, done.figures())
    return str(path)


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_texts_hold_what_is_shown_of_the_prompts_and_the_states_before_each_token(
    model: Any, prompts: list[Any], texts: TargetTexts
) -> None:
    for idx, (prompt, conversation) in enumerate(zip(prompts, CONVERSATIONS, strict=True)):
        place = texts.text(idx)
        told = texts.token_ids[place].tolist()
        num_hidden = prompt.images.num_tokens if isinstance(prompt, ImagePrompt) else 0
        answer = told[texts.answer(idx) - place.start :]
        assert len(told) == len(prompt) - num_hidden - 1 + len(answer)
        image_id = model.config.image_token_id
        whole = torch.tensor([[*prompt, *answer]])
        pictures = [part["image"] for part in conversation[0]["content"] if part["type"] == "image"]
        seen = dict(processor_of("llava")(images=pictures, return_tensors="pt")) if pictures else {}
        with torch.no_grad():
            states = model(input_ids=whole, output_hidden_states=True, **seen).hidden_states[-1][0]
        shown = whole[0] != image_id
        assert told == whole[0][shown][1:].tolist()
        torch.testing.assert_close(texts.features[place].clone(), states[shown][:-1], atol=1e-3, rtol=1e-3)


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_training_learns_the_targets_text(
    done: TrainedHead[FusedHead],
) -> None:
    assert done.losses[-1] < 0.2 * done.losses[0]
    assert done.accepted[0] > 0.5 and list(done.accepted) == sorted(done.accepted, reverse=True)
    assert done.head.num_weights * 2 < 10e6, "bytes of a file"


def test_tokens_of_prompts_are_read_and_not_learnt(target: RowRunner, texts: TargetTexts) -> None:
    token_ids, label_of = common_tokens(texts.token_ids, target.vocab_size)
    embeddings = as_tensor(target.embeddings(texts.token_ids.tolist()))
    batch = FusedExamples(texts, range(len(texts)), embeddings, label_of).batch(torch.arange(len(texts)))
    for idx, labels in enumerate(batch.labels):
        place, first = texts.text(idx), texts.answer(idx)
        learnt = labels != IGNORED
        assert token_ids[labels[learnt]].tolist() == texts.token_ids[first : place.stop].tolist()
        assert learnt.nonzero()[0].item() == first - place.start - 1, "the row before the answer guesses its beginning"


def test_a_draft_reads_in_each_step_what_the_unrolled_training_reads(
    target: RowRunner, texts: TargetTexts, done: TrainedHead[FusedHead]
) -> None:
    head, running, place = done.head, done.head.running(), texts.text(0)
    states, embeddings = (
        scaled(texts.features[place]),
        scaled(as_tensor(target.embeddings(texts.token_ids[place].tolist()))),
    )
    text = TextMemory(running)
    text.extend(0, states.numpy(), embeddings.numpy())
    (tree,) = draft(running, [text], num_layers=3)
    path = tree.best_chain()
    label_of = {int(token_id): label for label, token_id in enumerate(head.token_ids)}
    labels = torch.tensor([label_of[token] for token in path.tokens])
    guessed = torch.cat((embeddings, as_tensor(running.embedded(labels[:-1].numpy()))))[None]
    truth = torch.cat((states, torch.zeros(2, states.shape[1])))[None]  # not known yet: no step may read them
    total = 0.0
    with torch.no_grad():
        for step, (_, logits) in enumerate(unrolled(head, truth, guessed)):
            total += logits[0, len(states) - 1 + step].log_softmax(-1)[labels[step]].item()
            assert path.path_logprobs[step] == pytest.approx(total, abs=1e-4)


def test_a_draft_is_the_same_alone_and_beside_other_texts(texts: TargetTexts, done: TrainedHead[FusedHead]) -> None:
    memories, running, states = [], done.head.running(), texts.features.numpy()
    for length in (5, 12, 1):
        memories.append(TextMemory(running))
        memories[-1].extend(3, scaled_rows(states[:length]), scaled_rows(states[20 : 20 + length]))
    together = draft(running, memories)
    for memory, tree in zip(memories, together, strict=True):
        (alone,) = draft(running, [memory])
        assert alone.best_chain().tokens == tree.best_chain().tokens
        assert len(tree) == BEAM_WIDTH * 8
        assert all(parent == ROOT or parent < idx for idx, parent in enumerate(tree.parents))
        assert list(tree.path_logprobs) == sorted(tree.path_logprobs, reverse=True)


def test_a_training_that_goes_on_ends_with_the_weights_of_one_run(
    target: RowRunner, texts: TargetTexts, tmp_path: Path
) -> None:
    check_a_head_goes_on(partial(trained, target, texts, epochs=8), tmp_path)
    with pytest.raises(ModelError, match="is of another run: its width is 32, not 64"):
        trained(target, texts, tmp_path / "cut", epochs=8, width=64)


@pytest.mark.parametrize(("name", "value"), [("num_steps", 0), ("width", 30), ("epochs", 0), ("batch_size", 0)])
def test_a_setting_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be"):
        HivisTrainSettings(**{name: value})


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_missing_cut_off_or_no_drafter_is_refused_in_one_line(file: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*none; train a head with card train hivis"):
        Fused.load(tmp_path / "none")
    cut, whole = tmp_path / "cut", Path(file).read_bytes()
    for size in (10, 1000, len(whole) - 8):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="cut is cut off or damaged") as caught:
            Fused.load(cut)
        assert "\n" not in str(caught.value)
    cut.write_bytes(whole.replace(b"card-hivis-1", b"card-other-1"))
    with pytest.raises(ModelError, match=r"cut is no head \(card-hivis-1\); give a file that card train hivis wrote"):
        Fused.load(cut)


def test_a_drafter_of_another_target_is_refused_by_name(
    pair: Pair, file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ModelError, match=r"drafter.safetensors was trained for another target: its vocabulary has"):
        LLM(pair.target, method="hivis", hivis=file)
    with pytest.raises(SettingsError, match="the writer hivis needs a drafter: give hivis a file"):
        LLM(pair.target, method="hivis")
    other = tmp_path_factory.mktemp("other")
    with torch.no_grad():
        model = save_seeing("llava", other)
        model.get_input_embeddings().weight.normal_()
        model.save_pretrained(other)
    with pytest.raises(ModelError, match=r"drafter.safetensors was trained for another target: the embeddings"):
        LLM(str(other), method="hivis", hivis=file, dtype="float32")


# ---- the method -----------------------------------------------------------------------------------------------------


def answered(seeing: str, conversations: list[Any], params: SamplingParams, **settings: Any) -> list[RequestOutput]:
    settings = {"method": "vanilla", "dtype": "float32", "max_images": 2, "policy": "fixed", **settings}
    with LLM(seeing, **settings) as llm:
        return llm.generate(conversations, params)


def ids_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [one.outputs[0].token_ids for one in outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 8])
def test_method_hivis_writes_the_text_of_plain_decoding(seeing: str, file: str, temperature: float, count: int) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=MAX_TOKENS)
    expected = answered(seeing, CONVERSATIONS[:count], params)
    outputs = answered(seeing, CONVERSATIONS[:count], params, method="hivis", hivis=file)
    assert ids_of(outputs) == ids_of(expected)
    assert all(one.exact for one in outputs)
    if temperature == 0.0:
        assert all(one.stats.accepted_by_writer.get("hivis", 0) > 0 for one in outputs)


def test_it_writes_the_same_if_it_is_told_of_images_or_drafts_beside_others(seeing: str, file: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    expected = answered(seeing, CONVERSATIONS[:3], params)
    for settings in ({"method": "hivis", "hide_images": False}, {"method": "suffix", "writers": ("suffix", "hivis")}):
        assert ids_of(answered(seeing, CONVERSATIONS[:3], params, hivis=file, **settings)) == ids_of(expected)


@pytest.mark.parametrize("broken", ["read", "observe", "propose"])
def test_the_text_goes_on_if_the_drafter_fails(
    seeing: str, file: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("it is dead")

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    expected = answered(seeing, CONVERSATIONS[:2], params)
    monkeypatch.setattr(HivisSequence, broken, fail)
    outputs = answered(seeing, CONVERSATIONS[:2], params, method="hivis", hivis=file)
    assert ids_of(outputs) == ids_of(expected)
    assert not any(one.stats.verified_tokens for one in outputs)


@pytest.mark.parametrize("prefill_chunk", [7, 512])
def test_the_drafter_reads_in_the_engine_what_it_reads_in_training(
    seeing: str, target: RowRunner, texts: TargetTexts, file: str, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    full = HivisSequence.observe

    def observe(self: HivisSequence, found: Observation) -> None:
        full(self, found)
        seen.append((self.memory.first, self.memory.keys, self.memory.last_row))

    monkeypatch.setattr(HivisSequence, "observe", observe)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    answered(seeing, CONVERSATIONS[:1], params, method="hivis", hivis=file, prefill_chunk=prefill_chunk)
    head = Fused.load(file)
    head.attach(target, file)
    place = texts.text(0)
    states = scaled_rows(texts.features[place].numpy())
    embeddings = scaled_rows(target.embeddings(texts.token_ids[place].tolist()))
    assert len(seen) > 2
    for first, keys, last_row in seen[:-1]:  # the last pass may have been cut
        num_rows = keys.shape[2]
        expected = TextMemory(head)
        expected.extend(0, states[:num_rows], embeddings[:num_rows])
        assert first == 0
        np.testing.assert_allclose(keys, expected.keys, atol=1e-3, rtol=1e-3)
        np.testing.assert_allclose(last_row, expected.last_row, atol=1e-3, rtol=1e-3)


def test_a_text_whose_beginning_was_known_is_drafted_for_from_what_is_read(
    seeing: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts: list[int] = []
    full = HivisSequence.close

    def close(self: HivisSequence) -> None:
        firsts.append(self.memory.first)
        full(self)

    monkeypatch.setattr(HivisSequence, "close", close)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(seeing, method="hivis", hivis=file, dtype="float32", max_images=2, policy="fixed") as llm:
        first, again = (llm.chat(CONVERSATIONS[1], params)[0] for _ in range(2))
    assert first.outputs == again.outputs
    assert again.stats.reused_prompt_tokens > 0
    assert firsts[0] == 0 < firsts[1]


def test_what_it_wrote_is_not_told_as_copied() -> None:
    stats = RequestStats(accepted_by_writer={"hivis": 2}, accepted_tokens=2)
    assert accepted_in_words(stats) == "accepted 2: 100% of other writers (hivis 2)"
