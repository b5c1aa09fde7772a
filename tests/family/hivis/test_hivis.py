"""A drafter of text alone with states of a target that sees: it learns, goes on bit by bit, and changes no text."""

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
from card.backends.transformers.arrays import as_tensor
from card.config import EngineSettings
from card.errors import ModelError, SettingsError
from card.family.hivis.head import FusedModule
from card.family.hivis.train_hivis import FusedExamples, HivisTrainSettings, train_fused
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.head_training import IGNORED, TrainedHead, common_tokens
from card.family.learning.target_texts import TargetTexts, write_texts
from card.family.states.sequence import StateSequence
from card.models.block_loading import load_fused
from card.models.files.tensor_files import MappedTensors, write_tensors
from card.models.images import ImagePrompt
from card.models.loading import load_decoder, load_tokenizer
from card.models.runner import RowRunner
from card.models.runners import plain_runner
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
) -> TrainedHead[FusedModule]:
    values = {
        "num_steps": 3,
        "width": 32,
        "num_layers": 2,
        "batch_size": 4,
        "epochs": 30,
        "learning_rate": 1e-2,
        "checkpoint_steps": 7,
    }
    checkpoint = Checkpoint(folder / "training.pt", {})
    return train_fused(
        target, texts, HivisTrainSettings(**values | changes), checkpoint=checkpoint, on_step=stopping(stop_after)
    )


@pytest.fixture(scope="module")
def done(target: RowRunner, texts: TargetTexts, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead[FusedModule]:
    return trained(target, texts, tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def folder(done: TrainedHead[FusedModule], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("drafter") / "drafter"
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
    done: TrainedHead[FusedModule],
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


def test_a_training_that_goes_on_ends_with_the_weights_of_one_run(
    target: RowRunner, texts: TargetTexts, tmp_path: Path
) -> None:
    check_a_head_goes_on(partial(trained, target, texts, epochs=8), tmp_path)
    with pytest.raises(ModelError, match="is of another run: its width is 32, not 64"):
        trained(target, texts, tmp_path / "cut", epochs=8, width=64)


@pytest.mark.parametrize(
    ("name", "value"), [("num_steps", 0), ("width", 30), ("num_layers", 0), ("epochs", 0), ("batch_size", 0)]
)
def test_a_setting_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be"):
        HivisTrainSettings(**{name: value})


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_off_old_or_no_drafter_is_refused_in_one_line(
    target: RowRunner, folder: str, tmp_path: Path
) -> None:
    whole = Path(folder, "model.safetensors").read_bytes()
    cut = tmp_path / "model.safetensors"

    def failure() -> str:
        with pytest.raises(ModelError) as caught:
            load_fused(str(tmp_path), target, dtype="auto")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "there is no file" in failure()
    for size in (10, 1000, len(whole) - 8):
        cut.write_bytes(whole[:size])
        assert "model.safetensors is cut off or damaged" in failure()
    for other in (b"card-hivis-1", b"card-other-1"):
        cut.write_bytes(whole.replace(b"card-hivis-2", other))
        assert "is no drafter (card-hivis-2); give a file that card train hivis wrote" in failure()
    cut.write_bytes(whole.replace(b"layers.1.gate.weight", b"layers.9.gate.weight"))
    assert "model.safetensors is damaged: 'layers.1.gate.weight'" in failure()
    file = MappedTensors(Path(folder, "model.safetensors"))
    ids = file.arrays["token_ids"]
    for damage, said in (
        ({"token_ids": np.append(ids[1:], ids[1])}, "its token_ids name a token twice"),
        ({"token_ids": np.append(ids[1:], np.int32(4000))}, "its token_ids name token 4000, and there are 0 to"),
        ({"steps": file.arrays["steps"][1:]}, "steps has shape [1, 32], its facts ask for [2, 32]"),
        ({"steps": file.arrays["steps"] * np.nan}, "its steps has NaN or infinity"),
        ({"steps": file.arrays["steps"] + np.float32(np.inf)}, "its steps has NaN or infinity"),
        ({"num_layers": "99"}, "it has 99 layers, there may be 1 to 16"),
    ):
        facts = file.facts | {name: value for name, value in damage.items() if isinstance(value, str)}
        arrays = file.arrays | {name: value for name, value in damage.items() if not isinstance(value, str)}
        write_tensors(cut, arrays, facts)
        assert f"model.safetensors is damaged: {said}" in failure()


def test_a_drafter_of_another_target_or_elsewhere_is_refused_by_name(
    pair: Pair, seeing: str, folder: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ModelError, match=r"drafter was trained for another target: its vocabulary has"):
        LLM(pair.target, folder)
    with pytest.raises(SettingsError, match="process"):
        LLM(seeing, folder, method="sps", placement="process")
    for load in (load_decoder, load_tokenizer):  # as a draft server does, and vLLM's
        with pytest.raises(ModelError, match="is a drafter for one target, and no model: give it as draft of its"):
            load(folder)
    other = tmp_path_factory.mktemp("other")
    with torch.no_grad():
        model = save_seeing("llava", other)
        model.get_input_embeddings().weight.normal_()
        model.save_pretrained(other)
    with pytest.raises(ModelError, match=r"drafter was trained for another target: the embeddings"):
        LLM(str(other), folder, dtype="float32")


# ---- the texts ------------------------------------------------------------------------------------------------------


def answered(
    seeing: str, conversations: list[Any], params: SamplingParams, draft: str | None = None, **settings: Any
) -> list[RequestOutput]:
    method = "vanilla" if draft is None else "sps"
    settings = {"method": method, "dtype": "float32", "max_images": 2, "policy": "fixed", **settings}
    with LLM(seeing, draft, **settings) as llm:
        return llm.generate(conversations, params)


def ids_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [one.outputs[0].token_ids for one in outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (1, {"placement": "inline"}),
        (8, {"placement": "inline"}),
        (8, {"placement": "thread", "method": "card"}),
        (3, {"placement": "inline", "hide_images": False}),
        (3, {"placement": "inline", "method": "card", "policy": "auto"}),
    ],
)
def test_texts_are_those_of_plain_decoding(
    seeing: str, folder: str, temperature: float, count: int, settings: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=MAX_TOKENS)
    expected = answered(seeing, CONVERSATIONS[:count], params)
    outputs = answered(seeing, CONVERSATIONS[:count], params, folder, **settings)
    assert ids_of(outputs) == ids_of(expected)
    assert all(one.exact for one in outputs)
    if settings == {"placement": "inline"} and not temperature:
        assert all(one.stats.accepted_tokens > 0 for one in outputs)


@pytest.mark.parametrize("prefill_chunk", [7, 512])
def test_the_drafter_reads_in_the_engine_what_it_reads_in_training(
    seeing: str, texts: TargetTexts, folder: str, prefill_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, Any] = {}
    full = StateSequence.read

    def read(self: StateSequence, first: int, states: Any) -> None:
        seen.update(enumerate(np.array(states), first))
        full(self, first, states)

    monkeypatch.setattr(StateSequence, "read", read)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    for idx in (0, 1):  # with one image, and with two
        seen.clear()
        settings = {"placement": "inline", "prefill_chunk": prefill_chunk}
        (output,) = answered(seeing, [CONVERSATIONS[idx]], params, folder, **settings)
        assert output.stats.hidden_prompt_tokens > 0
        expected = texts.features[texts.text(idx)].numpy()
        assert sorted(seen) == list(range(len(seen))) and len(seen) >= len(expected) - 4, "the last pass may be cut"
        for place, state in list(seen.items())[: len(expected)]:
            np.testing.assert_allclose(state, expected[place], atol=1e-3, rtol=1e-3)


def test_a_text_whose_beginning_was_known_is_drafted_for_from_what_is_read(seeing: str, folder: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    settings = {"placement": "inline", "dtype": "float32", "max_images": 2, "policy": "fixed"}
    with LLM(seeing, folder, method="sps", **settings) as llm:
        first, again, other = (llm.chat(CONVERSATIONS[idx], params)[0] for idx in (1, 1, 0))
    assert first.outputs == again.outputs
    assert again.stats.reused_prompt_tokens > 0 and again.stats.verified_tokens > 0
    assert again.stats.drafter_reused_tokens == other.stats.drafter_reused_tokens == 0, "states depend on images"
