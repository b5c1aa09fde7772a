"""One server for all tests of this folder, on the demo pair in float32 with a drafter process; it must end up idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

from card.api.async_llm import AsyncLLM
from card.api.llm import LLM
from card.config import SamplingParams
from tests.server.running import MAX_QUEUED, Running, Solo, serving
from tests.waiting import until

if TYPE_CHECKING:  # tests of the core have no browser
    from playwright.sync_api import Browser

    from tests.server.browsing import Opener


@pytest.fixture(scope="session")
def demo_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(
        "demo-target", "demo-draft", dtype="float32", placement="process", policy="fixed", drafter_timeout_s=60.0
    )
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="session")
def shared_server(demo_llm: AsyncLLM) -> Iterator[Running]:
    with serving(demo_llm, served_model_names=("demo-target", "other-name"), max_num_queued_reqs=MAX_QUEUED) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The server; whatever a test does to it, nothing of it may be left."""
    yield shared_server
    until(shared_server.is_idle)


@pytest.fixture(scope="module")
def strict_server(demo_llm: AsyncLLM) -> Iterator[Running]:
    """Return a server on the same models that refuses what nothing reads."""
    with serving(demo_llm, strict_fields=True) as server:
        yield server


@pytest.fixture(scope="session")
def solo() -> Iterator[Solo]:
    """Return what plain decoding writes when nobody else asks."""
    with LLM("demo-target", dtype="float32", method="vanilla") as llm:

        @cache
        def text(prompt: str, max_tokens: int, **params: object) -> str:
            sampling = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": max_tokens, **params})
            return llm.generate(prompt, sampling)[0].outputs[0].text

        yield text


@pytest.fixture(scope="module")  # while it runs, this thread has an event loop, and others could not begin one
def browser() -> Iterator[Browser]:
    from tests.browser import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser) -> Opener:
    """Open the playground of a server in a tab of its own."""
    from tests.server.browsing import opener

    return opener(browser)
