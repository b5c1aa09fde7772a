"""The wrapper around ONNX Runtime GenAI's own engine, on a CPU: same text, whatever happens. Run by make test-onnx."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from card.backends.transformers.loading import load_model
from card.config import parse_parameter_count
from card.models.inflation import inflate
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets
from tests.inside.onnx.running import Decoded, decode, load_engine_model, turns
from tests.laws import NUM_NEW as NUM_SAMPLED
from tests.laws import NUM_TEXTS, TEMPERATURE, VOCAB_SIZE, chi_square, law_of, mixed_law, tiny_model

pytestmark = [pytest.mark.onnx, pytest.mark.timeout(600)]

NUM_NEW = 64
CARD = {"draft": "demo-draft", "draft_dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target at the price of 60 M parameters, so that a drafter has time to draft."""
    from tests.inside.onnx.paged import export_paged

    folder = tmp_path_factory.mktemp("target")
    model = load_model("demo-target").float()
    export_paged(inflate(model, parse_parameter_count("60M")), folder)
    load_tokenizer("demo-target").save(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_engine_model(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer("demo-target")
    (dataset,) = read_datasets([parse_spec("questions")], limit=5)
    return [question.encode(tokenizer) for question in dataset.questions]


@pytest.fixture(scope="module")
def plain(model: Any, folder: Path, prompts: list[list[int]]) -> Decoded:
    return decode(model, folder, prompts, max_tokens=NUM_NEW, at_once=3, card=None)


def test_the_model_of_these_tests_says_what_the_target_says(plain: Decoded, prompts: list[list[int]]):
    target = load_model("demo-target").float()
    for prompt_ids, text in zip(prompts, plain.texts, strict=True):
        told = target.generate(torch.tensor([prompt_ids]), max_new_tokens=NUM_NEW, do_sample=False)[0]
        assert len(text) > 10
        assert text == [token for token in told[len(prompt_ids) :].tolist() if token not in target.config.eos_token_id]


def test_greedy_texts_are_the_same_and_take_fewer_runs(
    model: Any, folder: Path, prompts: list[list[int]], plain: Decoded
):
    with_card = decode(model, folder, prompts, max_tokens=NUM_NEW, at_once=3, card=CARD)
    assert with_card.texts == plain.texts
    assert with_card.is_up
    assert with_card.num_runs < 0.8 * plain.num_runs
    assert 0 < sum(with_card.told.values()) <= with_card.num_accepted
    assert any(name.startswith("beam") for name in with_card.told)


def test_a_killed_drafter_changes_no_text(model: Any, folder: Path, prompts: list[list[int]], plain: Decoded):
    with_card = decode(model, folder, prompts, max_tokens=NUM_NEW, at_once=3, card=CARD, kill_at=12)
    assert with_card.texts == plain.texts
    assert with_card.restarts > 0 or not with_card.is_up


def test_writers_without_a_draft_model_need_no_process(
    model: Any, folder: Path, prompts: list[list[int]], plain: Decoded
):
    with_card = decode(model, folder, prompts, max_tokens=NUM_NEW, at_once=1, card={})
    assert with_card.texts == plain.texts
    assert with_card.num_accepted > 0


def test_two_turns_of_one_request_are_the_same(model: Any, folder: Path, prompts: list[list[int]]):
    assert turns(model, folder, prompts[:2], None) == turns(model, folder, prompts[:2], CARD)


def test_a_request_with_penalties_goes_on_without_drafts(model: Any, folder: Path, prompts: list[list[int]]):
    penalised = {"repetition_penalty": 1.3}
    alone = decode(model, folder, prompts[:2], max_tokens=32, at_once=2, card=None, sampling=penalised)
    with_card = decode(model, folder, prompts[:2], max_tokens=32, at_once=2, card=CARD, sampling=penalised)
    assert with_card.texts == alone.texts
    assert with_card.num_accepted == 0


def test_sampled_text_follows_the_law_of_the_target_alone(tmp_path: Path):
    """The engine's rule is its own; that it is exact for candidates like ours is worth to be known."""
    from tests.inside.onnx.paged import END_ID, export_paged

    def ended(law: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        """Return the law of texts that end where the engine ends them."""
        probs: dict[tuple[int, ...], float] = {}
        for text, prob in law.items():
            whole = text[: text.index(END_ID) + 1] if END_ID in text else text
            probs[whole] = probs.get(whole, 0.0) + prob
        return probs

    target = tiny_model(0.0)
    export_paged(target, tmp_path / "target", num_blocks=64)
    tiny_model(0.5).save_pretrained(tmp_path / "draft")
    prompt_ids = [0, 1, 2, 3, 4, 0, 1, 2]
    sampled = decode(
        load_engine_model(tmp_path / "target"),
        tmp_path / "target",
        [prompt_ids] * NUM_TEXTS,
        max_tokens=NUM_SAMPLED,
        at_once=8,
        card={"draft": str(tmp_path / "draft"), "draft_dtype": "float32", "row_cost": 0.0},
        sampling={"do_sample": True, "temperature": TEMPERATURE, "top_k": VOCAB_SIZE, "top_p": 1.0},
    )
    law = law_of(target, prompt_ids)
    counts = Counter((*text, END_ID)[:NUM_SAMPLED] for text in sampled.texts)  # the end is no event
    assert set(counts) <= set(ended(law))
    assert chi_square(counts, ended(law)) < 4.0
    assert chi_square(counts, ended(mixed_law(law))) > 8.0  # the test can tell
    assert 500 < sampled.num_accepted < sampled.num_proposed - 500  # both happened often enough to be seen
