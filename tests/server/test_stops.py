"""A stop string of byte tokens or special tokens ends a text at the same token in every way to ask for it."""

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
from tests.tokenizer_kinds import llama2

pytestmark = pytest.mark.timeout(240)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "ü"
NEWLINE, E_ACUTE, SMILE = ["<0x0A>"], ["<0xC3>", "<0xA9>"], ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
WRITTEN = ["<0xBC>", "▁a", *NEWLINE, "b", *E_ACUTE, "▁b", *SMILE, "[/INST]", "ab", "bb", "</s>"]
TEXT = " a\nbé b😀abbb"
ENDS = [  # stop string, number of tokens, text
    ("\n", 2, " a"),
    ("a\nb", 3, " "),
    ("é", 5, " a\nb"),
    ("bé b", 6, " a\n"),
    ("😀", 10, " a\nbé b"),
    ("[/INST]", 11, " a\nbé b😀"),
    ("😀[/INST]", 11, " a\nbé b"),
    ("[/INST]a", 12, " a\nbé b😀"),
    ("</s>", 14, TEXT),
]
every_end = pytest.mark.parametrize(("stop", "num_tokens", "text"), ENDS, ids=[repr(stop) for stop, *_ in ENDS])


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    """Return a model that writes these tokens, and its tokenizer."""
    tokenizer = llama2()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    ids = [tokenizer.convert_tokens_to_ids(one) for one in WRITTEN]
    model = chain_model(len(tokenizer), dict(itertools.pairwise(ids)))
    return model, tokenizer


@pytest.fixture(scope="module", params=["vanilla", "card"])
def llm(request: pytest.FixtureRequest, parts: tuple[Any, Any]) -> Iterator[LLM]:
    model, tokenizer = parts
    drafting = {"draft": model, "placement": "inline", "policy": "fixed"} if request.param == "card" else {}
    with LLM(model, tokenizer=tokenizer, method=request.param, dtype="float32", **drafting) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(parts: tuple[Any, Any]) -> Iterator[Running]:
    model, tokenizer = parts
    drafting = {"draft": model, "placement": "inline", "policy": "fixed"}
    llm = AsyncLLM(model, tokenizer=tokenizer, method="card", dtype="float32", **drafting)
    with serving(llm) as running:
        yield running
    asyncio.run(llm.shutdown())


def params(stop: str, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, stop=(stop,), logprobs=0, ignore_eos=True)


@every_end
def test_a_text_ends_with_the_token_that_completes_the_stop_string(
    llm: LLM, parts: tuple[Any, Any], stop: str, num_tokens: int, text: str
) -> None:
    wanted = tuple(map(parts[1].convert_tokens_to_ids, WRITTEN[1 : num_tokens + 1]))
    for max_tokens in (40, num_tokens):
        (result,) = llm.generate(PROMPT, params(stop, max_tokens))
        (output,) = result.outputs
        assert (output.text, output.token_ids, output.finish_reason) == (text, wanted, "stop")
        assert len(output.logprobs) == result.stats.num_new_tokens == num_tokens
        if llm.method.name == "card" and num_tokens > 5:
            assert result.stats.target_passes < num_tokens - 1, "several tokens are committed at once"
        chunks = list(llm.stream(PROMPT, params(stop, max_tokens)))
        assert "".join(chunk.text for chunk in chunks) == text
        assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == wanted
    short = llm.generate(PROMPT, params(stop, num_tokens - 1))[0].outputs[0] if num_tokens > 1 else None
    assert short is None or short.finish_reason == "length"


@every_end
def test_a_request_over_http_ends_there_too_streamed_or_not(
    server: Running, stop: str, num_tokens: int, text: str
) -> None:
    asked: dict[str, Any] = {"stop": [stop, "never"], "temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}
    usage = {"include_usage": True}
    answer = server.complete(prompt=PROMPT, logprobs=0, **asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == num_tokens
    chat = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, **asked}
    (told,) = server.post(CHAT, chat).json()["choices"]
    assert (told["message"]["content"], told["finish_reason"]) == (text, "stop")
    assert len(told["logprobs"]["content"]) == num_tokens
    bodies = [(COMPLETIONS, {"prompt": PROMPT, **asked}), (CHAT, {**chat, "stream_options": usage})]
    for path, body in bodies:
        (read,) = streams(server.url, path, [body])
        assert (read.text, read.finish_reason, read.is_done) == (text, "stop", True)
    assert read.events[-1]["usage"]["completion_tokens"] == num_tokens


def test_a_special_token_that_is_no_stop_string_is_passed_over(llm: LLM) -> None:
    output = llm.generate(PROMPT, params("[/INST]b", len(WRITTEN) - 1))[0].outputs[0]
    assert (output.text, output.finish_reason) == (TEXT, "length")
