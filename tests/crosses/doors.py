"""The ways to a text: the same prompt, method and models given to each command and class that answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.config import SamplingParams
from card.config.method import Method
from card.errors import CardError
from tests.commands import Ran, run_command
from tests.figures import check_metrics
from tests.server.running import PATIENCE_S, command, scraped, serving
from tests.waiting import until

PROMPT = "Paul has 3 apples and buys 4 more. How many apples does he have?"
MESSAGES = [{"role": "user", "content": PROMPT}]
MAX_TOKENS = 12
# Kinds of requests: fields of `SamplingParams`, which options and fields of requests are named like.
REQUESTS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.6, "min_tokens": 3},
}


@dataclass(frozen=True, slots=True)
class Setup:
    """A method with the models that it gets, and the other options that it cannot do without."""

    method: Method
    target: str
    draft: str | None
    own: Mapping[str, str]

    @property
    def options(self) -> list[str]:
        """All of it for a command."""
        words = ["--method", self.method.name, "--target", self.target, "--draft", self.draft or "none"]
        return [*words, *(word for name, value in self.own.items() for word in (f"--{name.replace('_', '-')}", value))]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question, or the line that says why nothing did."""

    text: str | None = None
    stats: Mapping[str, Any] | None = None  # where the door gives them
    refusal: str = ""


Capture = pytest.CaptureFixture[str]
Door = Callable[[Setup, dict[str, Any], Path, Capture], Answer]


def _flags(request: dict[str, Any]) -> list[str]:
    asked = {**request, "max_tokens": MAX_TOKENS}
    return [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _refused(ran: Ran) -> Answer:
    assert ran.status == 2 and ran.out == "", ran
    return Answer(refusal="".join(ran.err.splitlines(keepends=True)[-1:]))  # card bench tells before how far it is


def generate(setup: Setup, request: dict[str, Any], _: Path, capture: Capture) -> Answer:
    """Ask `card generate`."""
    ran = run_command(capture, "generate", PROMPT, "--json", *setup.options, *_flags(request))
    if ran.status:
        return _refused(ran)
    told = json.loads(ran.out)
    return Answer(told["text"], told.get("stats"))


def chat(setup: Setup, request: dict[str, Any], _: Path, capture: Capture) -> Answer:
    """Ask in `card chat`."""
    ran = run_command(capture, "chat", *setup.options, *_flags(request), stdin=f"{PROMPT}\n/quit\n".encode())
    return _refused(ran) if ran.status else Answer(ran.out.removesuffix("\n"))


def bench(setup: Setup, request: dict[str, Any], folder: Path, capture: Capture) -> Answer:
    """Measure the rows of the method with `card bench`, which compares their texts with plain decoding's."""
    from card.tools.bench.row_names import OURS

    rows = [name for name, spec in OURS.items() if spec.method == setup.method.name] or [setup.method.name]
    return bench_rows(rows, setup, request, folder, capture)


def bench_rows(rows: list[str], setup: Setup, request: dict[str, Any], folder: Path, capture: Capture) -> Answer:
    """Measure some rows, whose texts are those of plain decoding."""
    from card.tools.bench.results import load

    (folder / "prompts.jsonl").write_text(json.dumps({"question": PROMPT}), "utf-8")
    out = folder / "bench.jsonl"
    models = ["--target", setup.target, "--draft", setup.draft or "none"]
    own = [word for name, value in setup.own.items() for word in (f"--{name.replace('_', '-')}", value)]
    measured = ["--prompts", f"own={folder / 'prompts.jsonl'}", "--repeats", "1", "--sps-lengths", "3"]
    asked = {name: value for name, value in request.items() if name in ("temperature", "seed", "top_p")}
    ran = run_command(
        capture, "bench", "--methods", ",".join(rows), *models, *own, *measured, *_flags(asked), "--out", str(out)
    )
    if ran.status:
        return _refused(ran)
    (run,) = load(out)
    assert {sample.row for sample in run.samples} >= set(rows)
    assert all(check.is_same for check in run.checks)
    sample = next(sample for sample in run.samples if sample.row == rows[-1])
    assert sample.stats is not None
    return Answer(stats=sample.stats.as_dict())


def llm(setup: Setup, request: dict[str, Any], _: Path, __: Capture) -> Answer:
    """Ask `LLM`."""
    try:
        with LLM(setup.target, setup.draft, method=setup.method.name, **setup.own) as asked:
            (output,) = asked.chat(MESSAGES, SamplingParams(**request, max_tokens=MAX_TOKENS))
    except CardError as error:
        return Answer(refusal=f"{error}\n")
    return Answer(output.outputs[0].text, output.stats.as_dict())


def async_llm(setup: Setup, request: dict[str, Any], _: Path, __: Capture) -> Answer:
    """Ask `AsyncLLM`."""

    async def ask() -> Answer:
        asked = AsyncLLM(setup.target, setup.draft, method=setup.method.name, **setup.own)
        try:
            params = SamplingParams(**request, max_tokens=MAX_TOKENS)
            chunks = [chunk async for chunk in asked.generate(MESSAGES, params)]
        finally:
            await asked.shutdown()
        return Answer("".join(chunk.text for chunk in chunks), chunks[-1].stats.as_dict())

    try:
        return asyncio.run(ask())
    except CardError as error:
        return Answer(refusal=f"{error}\n")


def server(setup: Setup, request: dict[str, Any], _: Path, __: Capture) -> Answer:
    """Ask a server in this process, and check its figures."""
    try:
        asked = AsyncLLM(setup.target, setup.draft, method=setup.method.name, **setup.own)
    except CardError as error:
        return Answer(refusal=f"{error}\n")
    try:
        with serving(asked, served_model_names=("demo-target",)) as running:
            body = {"messages": MESSAGES, **request, "max_tokens": MAX_TOKENS, "include_metrics": True}
            response = running.post("/v1/chat/completions", {**body, "ignore_eos": False})
            assert response.status_code == 200, response.text
            two = running.post("/v1/chat/completions", {**body, "n": 2})
            until(running.is_idle)
            values = scraped(running)
            usages = [one.json()["usage"] for one in (response, two)]
            assert values["card_prompt_tokens_total", ""] == sum(one["prompt_tokens"] for one in usages)
            assert values["card_generation_tokens_total", ""] == sum(one["completion_tokens"] for one in usages)
            check_metrics(values, is_idle=True)
    finally:
        asyncio.run(asked.shutdown())
    told = response.json()
    return Answer(told["choices"][0]["message"]["content"], told["metrics"]["card"])


def serve(setup: Setup, request: dict[str, Any], folder: Path, _: Capture) -> Answer:
    """Ask `card serve`, the command, in a process of its own."""
    with command(folder, *setup.options) as served, httpx2.Client(base_url=served.url, timeout=PATIENCE_S) as client:
        body = {"messages": MESSAGES, **request, "max_tokens": MAX_TOKENS, "include_metrics": True}
        told = client.post("/v1/chat/completions", json=body).json()
    return Answer(told["choices"][0]["message"]["content"], told["metrics"]["card"])


DOORS: Mapping[str, Door] = {one.__name__: one for one in (generate, chat, bench, llm, async_llm, server)}
