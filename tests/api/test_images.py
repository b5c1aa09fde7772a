"""Prompts with images: transformers' own text, whatever runs beside them and however the prompt is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.errors import ModelError, PromptError, SettingsError
from card.models.loading import load_tokenizer
from tests.pair import Pair
from tests.seeing import FAMILIES, IMAGE_TOKEN, asked, generated, picture, save_seeing

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Any]]:
    """Save a model of a family once; return its folder, and the model as transformers has it."""

    @cache
    def saved(family: str) -> tuple[str, Any]:
        folder = tmp_path_factory.mktemp(family)
        return str(folder), save_seeing(family, folder)

    return saved


@pytest.fixture(scope="module")
def make(models) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    @cache
    def make_once(family: str, **settings: Any) -> LLM:
        made.append(LLM(models(family)[0], method="vanilla", dtype="float32", max_images=2, **settings))
        return made[-1]

    yield make_once
    for llm in made:
        llm.close()


def answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[int]:
    return list(llm.chat(messages, params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_transformers_with_the_same_images(models, make, family):
    for messages in (
        asked("the cat", picture(1)),
        asked("two", picture(2), picture(3, 28, 56)),
        asked("one two three"),
    ):
        assert answer(make(family), messages) == generated(models(family)[1], family, messages, NUM_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_beside_an_image_and_how_a_prompt_is_cut_change_no_token(models, make, family):
    whole = make(family)
    conversations = [asked("the cat", picture(1)), asked("six"), asked("two", picture(2), picture(3, 28, 56))]
    wanted = [answer(whole, one) for one in conversations]

    async def together() -> list[list[int]]:
        settings: dict[str, Any] = {"method": "vanilla", "dtype": "float32", "max_images": 2, "prefill_chunk": 5}
        async with AsyncLLM(models(family)[0], **settings) as llm:

            async def one(messages: list[dict[str, Any]]) -> list[int]:
                return [token_id async for chunk in llm.generate(messages, GREEDY) for token_id in chunk.token_ids]

            return list(await asyncio.gather(*(one(messages) for messages in conversations)))

    assert asyncio.run(together()) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_shared_with_the_same_image_and_never_with_another(make, family):
    llm = make(family)
    same, other = picture(11), picture(12)
    wanted = {}
    for name, shown in (("same", same), ("other", other)):
        llm.reset_prefix_cache()
        wanted[name] = answer(llm, asked("the other cat sat there", shown))
    assert wanted["same"] != wanted["other"]
    llm.reset_prefix_cache()
    first = llm.chat(asked("the other cat sat there", same), GREEDY)[0]
    again = llm.chat(asked("the other cat sat there", same), GREEDY)[0]
    differs = llm.chat(asked("the other cat sat there", other), GREEDY)[0]
    assert first.stats.reused_prompt_tokens == 0
    assert again.stats.reused_prompt_tokens == len(again.prompt_token_ids) - 1
    assert differs.prompt_token_ids == again.prompt_token_ids
    assert differs.stats.reused_prompt_tokens < 8
    assert list(again.outputs[0].token_ids) == wanted["same"]
    assert list(differs.outputs[0].token_ids) == wanted["other"]


def test_a_conversation_of_text_parts_needs_no_tower(pair: Pair):
    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat"}, {"type": "text", "text": "sat"}]}]
    with LLM(pair.target, method="vanilla") as llm:
        joined = llm.chat([{"role": "user", "content": "the cat\nsat"}], GREEDY)[0]
        assert llm.chat(parts, GREEDY)[0].prompt_token_ids == joined.prompt_token_ids
        with pytest.raises(PromptError, match="1 images, but this engine takes none"):
            llm.chat(asked("the cat", picture(1)), GREEDY)


def test_more_images_than_allowed_and_texts_that_name_the_image_token_are_refused(make):
    llm = make("llava")
    with pytest.raises(PromptError, match="3 images, but this engine takes at most 2"):
        llm.chat(asked("the cat", *[picture(1)] * 3))
    with pytest.raises(PromptError, match="2 places for 1 images"):
        llm.chat(asked(f"the {IMAGE_TOKEN}", picture(1)))
    with pytest.raises(PromptError, match="of type text, image_url or image, got 'video'"):
        llm.chat([{"role": "user", "content": [{"type": "video", "video": "a"}]}])
    with pytest.raises(PromptError, match="context holds"):
        llm.chat(asked("cat " * 600, picture(1)))


def test_a_target_that_cannot_see_is_refused_by_name(pair: Pair):
    with pytest.raises(ModelError, match="llama models take no images here; those of llava, qwen2_vl, qwen2_5_vl do"):
        LLM(pair.target, method="vanilla", max_images=1)
    with pytest.raises(SettingsError, match="given by name"):
        LLM(load_model(pair.target), method="vanilla", max_images=1, tokenizer=load_tokenizer(pair.target))


def test_a_checkpoint_without_its_vision_tower_or_processor_is_refused(tmp_path: Path):
    save_seeing("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"the vision tower of .* cannot be read") as refused:
        LLM(str(tmp_path), method="vanilla", max_images=1)
    assert "\n" not in str(refused.value)
