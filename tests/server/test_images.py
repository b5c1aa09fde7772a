"""Images over HTTP: the text of the Python API, and one clear 400 for what cannot be used."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.config import SamplingParams
from tests.seeing import asked, picture, save_seeing
from tests.server.running import Running, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"
ASKED = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def url(seed: int, kind: str = "image/png") -> str:
    out = io.BytesIO()
    picture(seed).save(out, "PNG")
    return f"data:{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def shown(*urls: object, role: str = "user") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": one, "detail": "low"}} for one in urls]
    return [{"role": role, "content": [*parts, {"type": "text", "text": "the cat"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing("llava", folder)
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Running]:
    (folder / "shown").mkdir()
    picture(3).save(folder / "shown" / "three.png")
    llm = AsyncLLM(str(folder), method="vanilla", dtype="float32", max_images=2, image_dir=str(folder / "shown"))
    with serving(llm, max_request_bytes=1 << 16) as server:
        yield server
    asyncio.run(llm.shutdown())


def test_an_answer_is_that_of_the_python_api(seeing: Running, folder: Path) -> None:
    with LLM(str(folder), method="vanilla", dtype="float32", max_images=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for seeds, urls in (((1,), [url(1, "image/webp")]), ((2, 3), [url(2), "three.png"])):
            wanted = llm.chat(asked("the cat", *map(picture, seeds)), params)[0]
            answer = seeing.post(CHAT, {"messages": shown(*urls), **ASKED})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == wanted.outputs[0].text
            assert answer.json()["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (shown("data:image/png;base64,AAAA"), "image 0 is no picture in PNG"),
        (shown(url(1)[:-400]), "cut off or damaged"),
        (shown(url(1), url(2), url(3)), "the prompt has 3 images, but this engine takes at most 2"),
        (shown("https://example.org/a.png"), "nothing is fetched from the web"),
        (shown("../model.safetensors"), "no file that can be read below the folder"),
        (shown("file:///etc/passwd"), "no file that can be read below the folder"),
        (shown(5), "a part of type image_url must have"),
        (shown(url(1), role="system"), "images belong to messages of the role user"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": url(1)}]}], "a part of type image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "only parts of type text and image_url"),
        ([*shown(url(1)), {"role": "user", "content": "<|image|>"}], "2 places for 1 images"),
    ],
)
def test_an_image_that_cannot_be_used_is_one_400_and_nothing_is_left(
    seeing: Running, messages: list[dict[str, Any]], words: str
) -> None:
    answer = seeing.post(CHAT, {"messages": messages, **ASKED})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert len(answer.json()["error"]["message"]) < 400
    until(seeing.is_idle)


def as_items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with images as the Responses API has them."""
    told = []
    for one in messages:
        parts = [
            {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
            if part["type"] == "image_url"
            else {"type": "input_text", "text": part["text"]}
            for part in one["content"]
        ]
        told.append({"role": one["role"], "content": parts})
    return told


def test_the_responses_api_answers_as_chat_completions_do(seeing: Running) -> None:
    messages = shown(url(2), "three.png")
    wanted = seeing.post(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 12}).json()
    asked = {"input": as_items(messages), "temperature": 0, "max_output_tokens": 12}
    answer = seeing.post("/v1/responses", asked).json()
    assert answer["output"][0]["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]


def test_ollamas_api_answers_as_chat_completions_do_and_reads_no_file(seeing: Running) -> None:
    wanted = seeing.post(CHAT, {"messages": shown(url(2)), "temperature": 0, "max_tokens": 12}).json()
    plain = url(2).partition(",")[2]
    asked = {"stream": False, "options": {"temperature": 0, "num_predict": 12}}
    message = {"role": "user", "content": "the cat", "images": [plain]}
    answer = seeing.post("/api/chat", {**asked, "messages": [message]}).json()
    assert answer["message"]["content"] == wanted["choices"][0]["message"]["content"]
    answer = seeing.post("/api/generate", {**asked, "prompt": "the cat", "images": [url(2)]}).json()
    assert answer["response"] == wanted["choices"][0]["message"]["content"]
    assert "vision" in seeing.post("/api/show", {}).json()["capabilities"]
    refused = seeing.post("/api/chat", {**asked, "messages": [{**message, "images": ["three.png"]}]})
    assert refused.status_code == 400 and "base64" in refused.json()["error"]
    until(seeing.is_idle)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (shown(url(1)[:-400]), "cut off or damaged"),
        (shown(url(1), url(2), url(3)), "the prompt has 3 images, but this engine takes at most 2"),
        (shown("https://example.org/a.png"), "nothing is fetched from the web"),
        (shown("../model.safetensors"), "no file that can be read below the folder"),
        (shown(url(1), role="system"), "images belong to messages of the role user"),
    ],
)
def test_the_responses_api_refuses_the_same_images(seeing: Running, messages: list[dict[str, Any]], words: str) -> None:
    answer = seeing.post("/v1/responses", {"input": as_items(messages), "temperature": 0})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    until(seeing.is_idle)


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(seeing: Running) -> None:
    answer = seeing.post(CHAT, {"messages": shown("data:image/png;base64," + "A" * (1 << 17)), **ASKED})
    assert answer.status_code == 413


def test_a_server_that_takes_no_images_says_so(server: Running) -> None:
    answer = server.post(CHAT, {"messages": shown(url(1))})
    assert answer.status_code == 400
    assert "this engine takes none" in answer.json()["error"]["message"]
