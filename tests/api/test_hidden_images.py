"""A drafter that sees text alone: the text of plain decoding, whatever it is told of images, and dead or alive."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from card.api.llm import LLM
from card.api.outputs import RequestOutput
from card.config import SamplingParams
from card.errors import VocabularyError
from tests.seeing import IMAGE_TOKEN, asked, picture, save_seeing, save_text_draft, seeing_tokenizer

UNSEEN = {seeing_tokenizer().convert_tokens_to_ids(IMAGE_TOKEN): -100.0}  # the draft model lacks it: no answer has it
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, seed=0, ignore_eos=True, logit_bias=UNSEEN)
SAMPLED = GREEDY.replace(temperature=0.7, seed=4, repetition_penalty=1.1)
CONVERSATIONS = (
    asked("the cat", picture(1)),
    asked("six"),
    asked("two", picture(2), picture(3, 28, 56)),
)

pytestmark = pytest.mark.timeout(180)
Folders = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Save target and draft of a family once."""

    @cache
    def saved(family: str) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp(family)
        save_text_draft(save_seeing(family, folder / "target"), folder / "draft")
        return str(folder / "target"), str(folder / "draft")

    return saved


def opened(folders: Folders, family: str, method: str, **settings: Any) -> LLM:
    target, draft = folders(family)
    settings = {"dtype": "float32", "max_images": 2, "policy": "fixed", **settings}
    return LLM(target, None if method == "vanilla" else draft, method=method, **settings)


def answers(llm: LLM) -> list[RequestOutput]:
    return [llm.chat(one, params)[0] for one, params in product(CONVERSATIONS, (GREEDY, SAMPLED))]


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Callable[[str], list[Any]]:
    @cache
    def texts(family: str) -> list[Any]:
        with opened(folders, family, "vanilla") as llm:
            return [one.outputs for one in answers(llm)]

    return texts


SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sps", {"placement": "inline"}),
    ("card", {"placement": "inline", "verify": "tree"}),
    ("card", {"placement": "thread", "writers": ("beam", "suffix", "lookup")}),
    ("card", {"placement": "inline", "hide_images": False}),
)
CELLS = [  # `make test` takes each setting with one family
    pytest.param(family, *one, marks=() if (idx + place) % 2 == 0 else pytest.mark.slow)
    for idx, family in enumerate(("llava", "qwen2_vl"))
    for place, one in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("family", "method", "settings"), CELLS)
def test_the_text_is_that_of_plain_decoding_with_images_hidden_or_not(folders, plain, family, method, settings):
    with opened(folders, family, method, **settings) as llm:
        results = answers(llm)
    assert [one.outputs for one in results] == plain(family)
    for idx, result in enumerate(results):
        has_images = idx // 2 != 1  # greedy and sampled of each conversation
        stats = result.stats
        hides = settings.get("hide_images", True)
        assert (stats.hidden_prompt_tokens > 0) == (has_images and hides)
        if has_images and not hides:  # the draft model has no token that stands for an image
            assert "has no token" in stats.declined
        else:
            assert not stats.declined
            assert stats.drafter_passes > 0 or settings["placement"] == "thread", "a thread may come too late"


def test_candidates_of_a_hiding_drafter_are_accepted(folders):
    with opened(folders, "llava", "sps", placement="inline") as llm:
        results = answers(llm)
    assert sum(one.stats.accepted_tokens for one in results if one.stats.hidden_prompt_tokens) > 0


def test_the_drafter_may_die_while_an_image_is_spoken_of(folders, plain):
    with opened(folders, "llava", "card", placement="process", wait_for_drafter=True) as llm:
        stream = llm.stream(CONVERSATIONS[0], GREEDY)
        token_ids = list(next(stream).token_ids)
        os.kill(llm.host.link.pid, signal.SIGKILL)
        for chunk in stream:
            token_ids += chunk.token_ids
    assert tuple(token_ids) == plain("llava")[0][0].token_ids


def test_without_images_the_draft_must_have_every_token_of_the_target(folders):
    target, draft = folders("llava")
    with pytest.raises(VocabularyError, match="only the target's has token"):
        LLM(target, draft, method="sps")
