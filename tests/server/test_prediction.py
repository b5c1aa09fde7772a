"""Predicted outputs: the answer is the same in fewer passes, and the usage says how much of the text was right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from card.api.async_llm import AsyncLLM
from card.errors import SettingsError
from card.server.prediction import Repeated
from tests.server.running import Running, serving
from tests.waiting import until

PROBLEM = "Anna has 25 apples. She eats 3 apples and gives 6 apples to a friend. How many apples does she have left?"
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def copying() -> Iterator[Running]:
    """Return a server whose only writer copies; it must end up idle."""
    llm = AsyncLLM("demo-target", dtype="float32", method="suffix", policy="fixed")
    with serving(llm) as server:
        yield server
        until(server.is_idle)
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def without(copying: Running) -> Callable[[float], str]:
    """Return the text without a prediction, by its temperature."""
    laws = {law["temperature"]: law for law in (GREEDY, SAMPLED)}
    return cache(lambda temperature: text(ask(copying, **laws[temperature])))


def asked(prediction: object, **fields: Any) -> dict[str, Any]:
    """Return the body of a request, with a prediction if that is not None."""
    told = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    return {"messages": [{"role": "user", "content": PROBLEM}], "max_tokens": 80, **told, **fields}


def ask(server: Running, prediction: object = None, **fields: Any) -> dict[str, Any]:
    """Return the answer, with its metrics."""
    response = server.post("/v1/chat/completions", asked(prediction, include_metrics=True, **fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def passes(answer: dict[str, Any]) -> int:
    return int(answer["metrics"]["speculative_decoding"]["num_spec_steps"])


def predicted(answer: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens of the prediction the answer repeats, and how many it does not."""
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_right_prediction_saves_passes_and_changes_nothing(copying: Running, law: dict[str, Any]) -> None:
    without = ask(copying, **law)
    right = ask(copying, text(without), **law)
    num_tokens = len(copying.service.tokenizer.encode(text(without), add_special_tokens=False))
    assert text(right) == text(without) and num_tokens > 20
    assert passes(right) < passes(without) / 2
    assert predicted(right) == (num_tokens, 0)
    assert "completion_tokens_details" not in without["usage"]
    parts = [{"type": "text", "text": one} for one in (text(without)[:10], text(without)[10:])]
    assert predicted(ask(copying, parts, **law)) == (num_tokens, 0)


def test_a_prediction_is_copied_again_behind_a_difference(copying: Running) -> None:
    without = ask(copying, **GREEDY)
    words = text(without).split(" ")
    changed = " ".join([*words[:4], "banana", *words[5:]])
    other = ask(copying, changed, **GREEDY)
    repeated, others = predicted(other)
    assert text(other) == text(without)
    assert passes(other) < passes(without) / 1.5
    assert repeated > 4 * others > 0


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prediction", ["", "x", "Nothing of the kind. " * 500, PROBLEM, "<|end|>\U0001f600"])
def test_no_prediction_changes_the_text(
    copying: Running, without: Callable[[float], str], prediction: str, law: dict[str, Any]
) -> None:
    answer = ask(copying, prediction, **law)
    assert text(answer) == without(law["temperature"])
    repeated, others = predicted(answer)
    ids = copying.service.tokenizer.encode(prediction, add_special_tokens=False)
    assert repeated + others == min(len(ids), copying.llm.max_model_len)


def test_each_choice_and_a_stream_count_too(copying: Running) -> None:
    prediction = text(ask(copying, **GREEDY))
    one = ask(copying, prediction, **GREEDY)
    both = ask(copying, prediction, n=2, **GREEDY)
    assert predicted(both) == (2 * predicted(one)[0], 0)
    body = asked(prediction, stream=True, stream_options={"include_usage": True}, **GREEDY)
    lines = copying.post("/v1/chat/completions", body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert predicted(events[-1]) == predicted(one)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "prediction.content"),
        ("a", "prediction"),
    ],
)
def test_what_is_no_prediction_is_refused(copying: Running, prediction: object, param: str) -> None:
    response = copying.post("/v1/chat/completions", {**asked(None), "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_prediction_of_other_tokens_than_the_models_is_refused(copying: Running) -> None:
    async def queue(ids: list[Any]) -> None:
        copying.llm.generate("a", prediction=ids)

    for ids in ([copying.service.vocab_size], [-1], ["a"]):
        with pytest.raises(SettingsError, match="prediction"):
            asyncio.run(queue(ids))


@pytest.mark.parametrize(
    ("prediction", "answer", "repeated"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], [1, 2], 2),
        ([1, 2, 3, 4], [4, 3, 2, 1], 0),
        ([1, 2, 3, 4, 5, 6, 7], [1, 9, 3, 4, 5, 6, 7], 6),  # a token that differs
        ([1, 2, 3, 4, 5, 6, 7], [1, 9, 9, 2, 3, 4, 5, 6, 7], 7),  # tokens that are new
        ([1, 2, 3, 4, 5, 6, 7], [1, 4, 5, 6, 7], 5),  # tokens that are gone
        ([1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4], 4),  # each counts once
        ([1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 9, 1, 2, 3, 4], 8),
        ([], [1, 2, 3, 4, 5], 0),
    ],
)
def test_tokens_that_an_answer_repeats_count_once_and_in_their_order(
    prediction: list[int], answer: list[int], repeated: int
) -> None:
    for size in (1, 3, len(answer)):
        counted = Repeated(prediction)
        for start in range(0, len(answer), size):
            counted.push(answer[start : start + size])
        assert (counted.num_repeated, counted.num_others) == (repeated, len(prediction) - repeated)
