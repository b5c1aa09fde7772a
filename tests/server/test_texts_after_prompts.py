"""What is written behind a prompt goes on with its text, and log-probabilities say where each token begins in it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.config import SamplingParams
from tests.server.running import Running, serving, streams
from tests.server.scripted import chain_model
from tests.tokenizer_kinds import KINDS

pytestmark = pytest.mark.timeout(240)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "ü"
TEXT = " abé b"  # what follows it
WRITTEN = {  # the prompt's last token, and each token that follows it
    "llama2": ["<0xBC>", "▁a", "b", "<0xC3>", "<0xA9>", "▁b", "</s>"],
    "metaspace always": ["<0xBC>", "▁a", "b", "<0xC3>", "<0xA9>", "▁b", "</s>"],
    "byte level": ["¼", "Ġa", "b", "Ã", "©", "Ġ", "¬b", "</s>"],  # the last character is broken
}
OFFSETS = {"llama2": [0, 2, 3, 3, 4, 6], "metaspace always": [0, 2, 3, 3, 4, 6], "byte level": [0, 2, 3, 3, 4, 5, 7]}
TEXTS = {"llama2": TEXT, "metaspace always": TEXT, "byte level": " abé \ufffdb"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}


def _model(kind: str) -> Any:
    ids = [KINDS[kind].convert_tokens_to_ids(token) for token in WRITTEN[kind]]
    assert KINDS[kind].encode(PROMPT, add_special_tokens=False)[-1] == ids[0]
    KINDS[kind].chat_template = "{{ messages[-1].content }}"
    model = chain_model(len(KINDS[kind]), dict(itertools.pairwise(ids)))
    model.generation_config.eos_token_id = ids[-1]
    return model


@pytest.fixture(scope="module", params=list(WRITTEN))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[Running]:
    llm = AsyncLLM(_model(kind), tokenizer=KINDS[kind], method="vanilla", dtype="float32")
    with serving(llm) as running:
        yield running
    asyncio.run(llm.shutdown())


def _told(choices: list[dict[str, Any]]) -> list[int]:
    """Return all offsets, each of which points into what was told by then."""
    offsets: list[int] = []
    length = 0
    for choice in choices:
        length += len(choice["text"])
        here = choice["logprobs"]["text_offset"]
        assert len(here) == len(choice["logprobs"]["tokens"])
        assert all(offset <= length for offset in here)
        offsets += here
    return offsets


def test_a_completion_goes_on_with_the_prompts_text(server: Running, kind: str) -> None:
    prompt_ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    for prompt in (PROMPT, prompt_ids):
        assert server.text(prompt=prompt, **GREEDY) == TEXTS[kind]
        assert server.text(prompt=prompt, echo=True, **GREEDY) == PROMPT + TEXTS[kind]
    (read,) = streams(server.url, COMPLETIONS, [{"prompt": PROMPT, "echo": True, **GREEDY}])
    assert read.text == PROMPT + TEXTS[kind]


def test_an_answer_goes_on_with_the_conversations_text(server: Running, kind: str) -> None:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, **GREEDY}
    choice = server.post(CHAT, asked).json()["choices"][0]
    assert choice["message"]["content"] == TEXTS[kind]
    raw = bytes(byte for token in choice["logprobs"]["content"][:-1] for byte in token["bytes"])
    assert raw.decode(errors="replace") == TEXTS[kind]
    (read,) = streams(server.url, CHAT, [asked])
    assert read.text == TEXTS[kind]
    response = server.post("/v1/responses", {"input": PROMPT, "temperature": 0}).json()
    assert response["output"][0]["content"][0]["text"] == TEXTS[kind]


def test_a_stop_string_that_begins_with_the_first_blank_is_found(server: Running, kind: str) -> None:
    for stop, before in ((" a", ""), ("b\u00e9", " a"), ("\u00e9 ", " ab")):
        choice = server.complete(prompt=PROMPT, stop=stop, logprobs=0, **GREEDY)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (before, "stop")
        wanted = [min(offset, len(before)) for offset in OFFSETS[kind]]
        assert _told([choice]) == wanted[: len(choice["logprobs"]["tokens"])]
        (read,) = streams(server.url, COMPLETIONS, [{"prompt": PROMPT, "stop": stop, "logprobs": 0, **GREEDY}])
        assert read.text == before
        assert _told([event["choices"][0] for event in read.events]) == _told([choice])


@pytest.mark.parametrize("echoes", [False, True])
def test_offsets_point_into_the_text_in_a_stream_too(server: Running, kind: str, echoes: bool) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "echo": echoes, "logprobs": 1, **GREEDY}
    prompt_ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    wanted = OFFSETS[kind] if not echoes else [0] * len(prompt_ids) + [1 + offset for offset in OFFSETS[kind]]
    choice = server.complete(**asked)["choices"][0]
    assert _told([choice]) == wanted
    for name, offset in zip(choice["logprobs"]["tokens"], wanted, strict=True):
        if offset and "\ufffd" not in name and name != "</s>":
            assert choice["text"].startswith(name, offset)
    (read,) = streams(server.url, COMPLETIONS, [asked])
    assert _told([event["choices"][0] for event in read.events]) == wanted
    tree = {**asked, "shows_tree": True}
    (read,) = streams(server.url, COMPLETIONS, [tree])
    assert _told([event["choices"][0] for event in read.events]) == wanted
    alone = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    (read,) = streams(server.url, COMPLETIONS, [alone])
    assert _told([event["choices"][0] for event in read.events]) == [0] * len(prompt_ids)
    assert _told(server.complete(**alone)["choices"]) == [0] * len(prompt_ids)


def test_a_prompt_that_ends_within_a_character_is_echoed_without_it_and_goes_on_with_it(
    server: Running, kind: str
) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    prompt_ids = ids + [KINDS[kind].convert_tokens_to_ids(token) for token in WRITTEN[kind][1:4]]
    choice = server.complete(prompt=prompt_ids, echo=True, logprobs=0, **GREEDY)["choices"][0]
    assert choice["text"] == PROMPT + TEXTS[kind]
    assert _told([choice]) == [0] * len(ids) + [1 + offset for offset in OFFSETS[kind]]
    assert server.text(prompt=prompt_ids, **GREEDY) == TEXTS[kind][3:]


def test_the_python_api_gives_the_same_texts_and_so_do_its_streams(kind: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(_model(kind), tokenizer=KINDS[kind], method="vanilla", dtype="float32") as llm:
        assert llm.generate(PROMPT, params)[0].outputs[0].text == TEXTS[kind]
        assert llm.chat([{"role": "user", "content": PROMPT}], params)[0].outputs[0].text == TEXTS[kind]
        assert "".join(chunk.text for chunk in llm.stream(PROMPT, params)) == TEXTS[kind]
        stopped = llm.generate(PROMPT, params.replace(stop=(" a",)))[0].outputs[0]
    assert (stopped.text, len(stopped.token_ids), stopped.finish_reason) == ("", 1, "stop")


def test_a_grammar_that_wants_the_blank_gets_it(server: Running, kind: str) -> None:
    pytest.importorskip("llguidance")
    if kind.startswith("metaspace"):
        pytest.skip("llguidance does not know that decoder's blanks")
    assert server.text(prompt=PROMPT, guided_regex=" ab", **GREEDY) == " ab"
