"""What clients ask for, they get: through OpenAI's own client, and over plain HTTP where that one hides things."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from card.api.async_llm import AsyncLLM
from card.text.prompts import RESERVED_KWARGS
from tests.server.running import PROMPT, Running, Solo, serving, streams
from tests.server.scripted import scripted

pytestmark = pytest.mark.timeout(240)

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
GREEDY: Any = {"model": "demo-target", "temperature": 0.0}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- completions ----------------------------------------------------------------------------------------------------


def test_a_completion_is_the_text_of_plain_decoding(client: openai.OpenAI, solo: Solo) -> None:
    answer = client.completions.create(prompt=PROMPT, max_tokens=16, **GREEDY)
    assert answer.choices[0].text == solo(PROMPT, 16)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer.object == "text_completion"


def test_a_streamed_completion_is_the_same_text_in_pieces(client: openai.OpenAI, solo: Solo) -> None:
    pieces = list(
        client.completions.create(
            prompt=PROMPT, max_tokens=16, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == solo(PROMPT, 16)
    assert len({piece.id for piece in pieces}) == 1
    assert len(pieces) > 3
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]][-1] == "length"
    assert pieces[-1].choices == [] and pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 16


def test_prompts_may_be_text_or_token_ids_one_or_several(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    shapes: list[tuple[Any, int]] = [(PROMPT, 1), (ids, 1), ([PROMPT, PROMPT], 2), ([ids, ids], 2), ([PROMPT, ids], 2)]
    texts = set()
    for prompt, num_choices in shapes:
        answer = server.complete(prompt=prompt, max_tokens=6, temperature=0)
        assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
        texts |= {choice["text"] for choice in answer["choices"]}
        assert answer["usage"]["prompt_tokens"] == num_choices * len(ids)
    assert len(texts) == 1


def test_the_same_seed_gives_the_same_texts_and_choices_differ(server: Running, solo: Solo) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 3}
    first, again = (server.complete(**asked)["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in again]
    assert len(set(texts)) == 3
    assert texts[0] == solo(PROMPT, 12, temperature=1.0, seed=5), "the first choice has the request's own seed"
    assert server.text(**{**asked, "n": 1, "seed": -5}) != texts[0]


def test_several_choices_are_streamed_side_by_side(server: Running) -> None:
    asked = {"prompt": [PROMPT, "The cat"], "max_tokens": 8, "temperature": 1.0, "seed": 3, "n": 2}
    whole = [choice["text"] for choice in server.complete(**asked)["choices"]]
    (read,) = streams(server.url, "/v1/completions", [asked])
    texts = [""] * 4
    for event in read.events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == whole
    assert read.is_done


def test_the_text_ends_before_a_stop_string_wherever_its_pieces_fall(server: Running, solo: Solo) -> None:
    text = solo(PROMPT, 40)
    stop = text[17:20]
    wanted = text[: text.index(stop)]
    answer = server.complete(prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop, "@@@"])["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (wanted, "stop")
    (read,) = streams(
        server.url, "/v1/completions", [{"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": stop}]
    )
    assert (read.text, read.finish_reason) == (wanted, "stop")


def test_streamed_pieces_never_split_a_character(server: Running) -> None:
    signs = "\u6f22\u5b57\U0001f34e\u6f22\u5b57"
    assert len(server.post("/tokenize", {"prompt": signs}).json()["tokens"]) > 2 * len(signs)
    schema = {"type": "json_schema", "json_schema": {"name": "signs", "schema": {"enum": [signs]}}}
    asked = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "response_format": schema, "speculation": "off"}
    (read,) = streams(server.url, "/v1/completions", [asked])
    pieces = [choice["text"] for event in read.events for choice in event["choices"]]
    assert "".join(pieces) == f'"{signs}"'
    assert not any("\ufffd" in piece for piece in pieces)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_an_echoed_prompt_is_scored_as_lm_eval_asks_for_it(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    asked = {"prompt": [ids, ids[:4]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    for choice, sent in zip(server.complete(**asked)["choices"], (ids, ids[:4]), strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["tokens"]) == len(told["top_logprobs"]) == len(sent) + 1
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert logprob <= max(top.values()) <= 0
            assert logprob in top.values()
        assert "".join(told["tokens"]) == choice["text"]
        assert told["text_offset"] == [sum(map(len, told["tokens"][:i])) for i in range(len(told["tokens"]))]


def test_a_prompt_scored_alone_has_the_scores_that_writing_it_gave(server: Running) -> None:
    written = server.complete(prompt=PROMPT, max_tokens=10, temperature=0, logprobs=2)["choices"][0]
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    new_ids = server.post("/tokenize", {"prompt": PROMPT + written["text"]}).json()["tokens"][len(ids) :]
    asked = {"prompt": ids + new_ids, "max_tokens": 0, "echo": True, "logprobs": 2}
    echoed = server.complete(**asked)["choices"][0]
    assert echoed["text"] == PROMPT + written["text"]
    scores = echoed["logprobs"]["token_logprobs"][len(ids) :]
    assert scores == pytest.approx(written["logprobs"]["token_logprobs"], abs=1e-4)
    assert echoed["finish_reason"] == "length"
    (read,) = streams(server.url, "/v1/completions", [asked])
    assert read.text == echoed["text"]
    assert read.events[0]["choices"][0]["logprobs"] == echoed["logprobs"]


def test_chat_log_probabilities_are_the_targets_and_add_up(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3, seed=1, model="demo-target", temperature=1.0
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert "".join(token.token for token in told.content) == answer.choices[0].message.content
    for token in told.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-6
        assert len(token.top_logprobs) == 3


def test_streamed_log_probabilities_are_those_of_the_whole_answer(server: Running) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    whole = server.post("/v1/chat/completions", asked).json()["choices"][0]["logprobs"]["content"]
    (read,) = streams(server.url, "/v1/chat/completions", [asked])
    told = [
        t for event in read.events for choice in event["choices"] for t in (choice["logprobs"] or {}).get("content", ())
    ]
    assert [token["token"] for token in told] == [token["token"] for token in whole]
    assert [t["logprob"] for t in told] == pytest.approx([t["logprob"] for t in whole], abs=1e-4)


# ---- chat -----------------------------------------------------------------------------------------------------------


CALLS: Any = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ],
    ids=str,
)
def test_a_last_message_may_be_empty(server: Running, last: dict[str, Any]) -> None:
    for messages in ([last], [*MESSAGES, last]):
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
    assert server.post("/tokenize", {"messages": [last]}).json()["count"] > 0


def test_an_empty_input_of_the_responses_api_is_an_empty_message(server: Running) -> None:
    for given in ("", [{"role": "user", "content": ""}], [{"role": "user", "content": []}]):
        answer = server.post("/v1/responses", {"input": given, "max_output_tokens": 2})
        assert answer.status_code == 200, answer.text


def test_a_conversation_goes_through_the_models_chat_template(client: openai.OpenAI, solo: Solo) -> None:
    with_template = f"<|user|>{PROMPT}<|end|><|assistant|>"
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=20, **GREEDY)
    assert answer.choices[0].message.content == solo(with_template, 20)
    assert answer.choices[0].message.role == "assistant"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    again = client.chat.completions.create(messages=parts, max_tokens=20, **GREEDY)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_a_streamed_chat_begins_with_the_role_and_ends_with_reason_usage_and_done(server: Running, solo: Solo) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "stream_options": {"include_usage": True}}
    (read,) = streams(server.url, "/v1/chat/completions", [asked])
    assert read.text == solo(f"<|user|>{PROMPT}<|end|><|assistant|>", 20)
    assert read.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert read.events[-2]["choices"][0]["finish_reason"] == "length"
    assert read.events[-1]["choices"] == []
    assert read.events[-1]["usage"]["completion_tokens"] == 20
    assert read.is_done
    assert all(event["object"] == "chat.completion.chunk" for event in read.events)


@pytest.mark.parametrize("asks", [True, False])
def test_the_usage_of_a_stream_is_null_until_its_end_if_it_is_asked_for(server: Running, asks: bool) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "stream_options": {"include_usage": asks}}
    for path, words in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        (read,) = streams(server.url, path, [{**asked, **words}])
        *pieces, last = read.events
        assert all(("usage" in piece) == asks and not piece.get("usage") for piece in pieces)
        assert bool(last.get("usage")) == asks


def test_an_answer_may_be_held_to_json(client: openai.OpenAI) -> None:
    schema: Any = {"enum": ["forty", "two"]}
    answer = client.chat.completions.create(
        messages=MESSAGES,
        max_tokens=20,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        **GREEDY,
    )
    assert answer.choices[0].message.content in ('"forty"', '"two"')
    assert answer.choices[0].finish_reason == "stop"


PAIR = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_choice": ["forty", 'two "2"']}, r'forty|two "2"'),
        ({"guided_regex": "[xy]{3}"}, "[xy]{3}"),
        ({"guided_json": {"enum": [17]}}, "17"),
        ({"guided_json": '{"enum": [17]}'}, "17"),
        ({"guided_grammar": 'start: "ab" | "cd"'}, "ab|cd"),
        ({"guided_grammar": 'root ::= item item\nitem ::= "x" | "y"'}, "[xy]{2}"),
        ({"structured_outputs": {"json": {"enum": [17]}}}, "17"),
        ({"structured_outputs": {"json": PAIR, "disable_any_whitespace": True}}, r'\{"a":1,"b":2\}'),
        ({"structured_outputs": {"choice": ["forty"]}}, "forty"),
        ({"structured_outputs": {"regex": "[xy]{3}"}}, "[xy]{3}"),
        ({"structured_outputs": {"grammar": 'start: "ab"'}}, "ab"),
    ],
    ids=str,
)
def test_vllms_ways_to_hold_an_answer_to_a_form_do_so(server: Running, form: dict[str, Any], pattern: str) -> None:
    asked = {"max_tokens": 30, "temperature": 0, **form}
    chat = server.post("/v1/chat/completions", {"messages": MESSAGES, **asked}).json()["choices"][0]
    assert re.fullmatch(pattern, chat["message"]["content"])
    assert chat["finish_reason"] == "stop"
    assert re.fullmatch(pattern, server.text(prompt=PROMPT, **asked))


ASKING_FOR_NOTHING: dict[str, Any] = {
    "best_of": 1,
    "metadata": {"run": "7"},
    "service_tier": "auto",
    "store": True,
    "user": "me",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "logit_bias": None,
}


def test_fields_that_ask_for_nothing_change_nothing(server: Running, solo: Solo) -> None:
    asked = {**ASKING_FOR_NOTHING, "max_tokens": 12, "temperature": 0}
    assert server.text(prompt=PROMPT, **asked) == solo(PROMPT, 12)
    chat = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "reasoning_effort": "low"}
    chat |= {"modalities": ["text"], "chat_template_kwargs": {"enable_thinking": False}}
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, **asked, **chat}).json()
    assert answer["choices"][0]["message"]["content"] == solo(f"<|user|>{PROMPT}<|end|><|assistant|>", 12)


def test_a_turn_of_the_assistant_may_have_no_content(server: Running) -> None:
    for empty in ({"content": None}, {}, {"content": None, "refusal": None, "audio": None, "tool_calls": None}):
        messages = [*MESSAGES, {"role": "assistant", **empty}, *MESSAGES]
        answer = server.post("/tokenize", {"messages": messages}).json()
        told = f"<|user|>{PROMPT}<|end|><|assistant|><|end|><|user|>{PROMPT}<|end|><|assistant|>"
        assert answer["count"] == server.post("/tokenize", {"prompt": told}).json()["count"]


def test_a_developer_speaks_for_the_system_where_the_template_knows_no_developers(server: Running) -> None:
    told = [
        server.post("/tokenize", {"messages": [{"role": role, "content": "Be brief."}, *MESSAGES]}).json()["tokens"]
        for role in ("developer", "system")
    ]
    assert told[0] == told[1]


def test_variables_for_the_chat_template_reach_it() -> None:
    model = scripted({"yes": ["Yes."], "no": ["No."]}, "{% if polite %} yes{% else %} no{% endif %}")
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    with serving(llm) as server:
        for kwargs, text in (({"polite": True}, "Yes."), ({}, "No.")):
            asked = {"messages": MESSAGES, "temperature": 0, "chat_template_kwargs": kwargs}
            answer = server.post("/v1/chat/completions", asked).json()
            assert answer["choices"][0]["message"]["content"] == text
    asyncio.run(llm.shutdown())


def test_clients_cannot_set_what_the_server_gives_the_chat_template() -> None:
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    rendering = inspect.signature(render_jinja_template).parameters
    assert (set(own) | set(rendering)) - {"kwargs", "documents"} <= RESERVED_KWARGS


# ---- our own extras -------------------------------------------------------------------------------------------------


def test_a_request_without_speculation_has_the_same_text_and_no_candidates(server: Running, solo: Solo) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "include_metrics": True, "speculation": "off"}
    answer = server.complete(**asked)
    assert answer["choices"][0]["text"] == solo(PROMPT, 16)
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_metrics_of_a_request_come_in_the_published_shape_streamed_or_not(server: Running) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "include_metrics": True}
    (read,) = streams(server.url, "/v1/completions", [asked])
    for told in (server.complete(**asked)["metrics"], read.events[-1]["metrics"]):
        found = told["speculative_decoding"]
        assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1
        assert sum(found["acceptance_histogram"]) == found["num_spec_steps"] > 0
        accepted = sum(kept * steps for kept, steps in enumerate(found["acceptance_histogram"]))
        assert accepted == found["num_accepted_draft_tokens"]
        assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / found["num_spec_steps"])
        assert told["generation_time_ms"] > 0
    assert server.complete(**asked, n=2)["metrics"] is None
    assert "metrics" not in server.complete(prompt=PROMPT, max_tokens=2)
    with serving(server.llm, spec_metrics="summary") as telling:
        assert "speculative_decoding" in telling.complete(prompt=PROMPT, max_tokens=2)["metrics"]


def test_shows_tree_tells_of_every_token_where_it_came_from(server: Running) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "shows_tree": True}
    choice = server.complete(**asked)["choices"][0]
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
    assert {"token_id", "text", "origin", "alternatives"} == set(choice["tokens"][0])
    (read,) = streams(server.url, "/v1/completions", [asked])
    told = [token for event in read.events for c in event["choices"] for token in c.get("tokens", ())]
    assert [token["token_id"] for token in told] == [token["token_id"] for token in choice["tokens"]]
    assert {token["origin"] for token in told} <= {"", "plain", "beam"}


# ---- the catalogue --------------------------------------------------------------------------------------------------


def test_models_are_listed_under_their_served_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo-target", "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"
    answer = client.completions.create(model="other-name", prompt=PROMPT, max_tokens=1)
    assert answer.model == "other-name"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_tokenize_and_detokenize_are_each_others_inverse(server: Running) -> None:
    told = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == server.llm.max_model_len
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": PROMPT}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert (
        chat["count"] == server.post("/tokenize", {"prompt": f"<|user|>{PROMPT}<|end|><|assistant|>"}).json()["count"]
    )


def test_the_server_describes_itself(server: Running) -> None:
    assert server.client.get("/version").json()["draft_model"] == "demo-draft"
    assert server.client.get("/load").json()["server_load"] == 0
    paths = server.client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health/ready"} <= set(paths["paths"])
    assert {"ChatRequest", "CompletionRequest", "Message"} <= set(paths["components"]["schemas"])


# ---- OpenAI's exceptions --------------------------------------------------------------------------------------------


def test_a_field_that_is_not_done_is_refused_with_its_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=MESSAGES, functions=[{"name": "f"}], **GREEDY)
    assert refused.value.param == "functions"
    assert "functions is not supported" in refused.value.message
    assert refused.value.request_id


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nobody")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(prompt=PROMPT * 1000, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(messages=MESSAGES, n=0, model="demo-target")
    assert wrong.value.param == "n"


def test_a_request_id_is_taken_over_or_made_up(server: Running) -> None:
    assert server.client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = server.client.get("/health", headers={"x-request-id": "no/good" * 30}).headers["x-request-id"]
    assert made.startswith("req-")


def test_whatever_can_be_got_can_be_asked_for_its_head(server: Running) -> None:
    told = server.client.get("/openapi.json").json()["paths"]
    paths = [path for path, how in told.items() if "get" in how and "{" not in path]
    assert "/health" in paths and "/v1/models" in paths
    for path in [*paths, "/v1/models/tiny", "/v1/models/none"]:
        head, whole = server.client.head(path), server.client.get(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert not any("head" in how for how in told.values())
    assert server.client.head("/v1/completions").status_code == 405
