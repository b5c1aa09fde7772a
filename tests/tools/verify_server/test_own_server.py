"""Our own server passes every check, on a tiny pair whose draft model is often wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from card.api.async_llm import AsyncLLM
from card.tools.verify_server.checks import CHECKS
from tests.pair import Pair
from tests.server.running import Running, serving
from tests.tools.verify_server.conftest import Verify

pytestmark = pytest.mark.timeout(240)
KEY = "sk-tiny"


@pytest.fixture(scope="module")
def tiny_server(pair: Pair) -> Iterator[Running]:
    llm = AsyncLLM(pair.target, pair.draft, dtype="float32", placement="inline", policy="fixed")
    with serving(llm, served_model_names=("tiny",), api_keys=(KEY,)) as server:
        yield server
    asyncio.run(llm.shutdown())


def test_our_server_passes_every_check_with_token_ids(verify: Verify, tiny_server: Running) -> None:
    ran = verify(tiny_server.url, "--api-key", KEY, "--max-tokens", "12")
    assert {one["name"]: one["outcome"] for one in ran.report["results"]} == dict.fromkeys(CHECKS, "equal"), ran.out
    assert (ran.status, ran.err) == (0, "")
    assert ran.report["compares_ids"] is True
    assert ran.report["num_drafted"] > 0
    assert ran.report["num_plain_drafted"] == 0
    assert ran.report["compared_with"].startswith('its plain answers, asked with {"speculation": "off"}')
    assert KEY not in ran.out


def test_our_server_passes_by_completions_and_with_a_reference(verify: Verify, tiny_server: Running) -> None:
    keys = ["--api-key", KEY, "--reference-api-key", KEY, "--model", "tiny", "--reference-model", "tiny"]
    checks = "greedy,seeded,extended,stop-stream,logprobs,likeliest,stream,choices"
    options = [*keys, "--api", "completions", "--only", checks, "--max-tokens", "16"]
    ran = verify(tiny_server.url, "--reference", f"{tiny_server.url}/v1/", *options)
    assert (ran.status, ran.err) == (0, ""), ran.out
    assert ran.report["path"] == "completions"
    assert ran.report["reference"] == f"{tiny_server.url}/v1"
