"""schemathesis over the API as `/openapi.json` describes it: no answer is a failure of ours or other than described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.clients.running import FOLDER, KEY, installed, run_client
from tests.server.running import Command, command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(4000)]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)
MAX_EXAMPLES = 60  # of each path, besides those at the edges of the schema
SEED = 1


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A server that takes on little, so that no example takes long."""
    limits = ("--max-model-len", "64", "--max-request-tokens", "8", "--max-num-seqs", "4", "--max-num-queued-reqs", "4")
    folder = tmp_path_factory.mktemp("small-server")
    with command(folder, "demo-target", *limits, env={"CARD_API_KEY": KEY}) as running:
        yield running


def test_nothing_that_fits_the_schema_or_does_not_makes_the_server_fail(small_server: Command, tmp_path: Path) -> None:
    program = installed("st", "run make test-clients")
    run_client(
        *(program, "--no-color", "run", f"{small_server.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS), "--warnings", "off"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(MAX_EXAMPLES), "--seed", str(SEED)),
        *("--request-timeout", "60", "--suppress-health-check", "all", "--continue-on-failure"),
        folder=tmp_path,
        env={"SCHEMATHESIS_HOOKS": "tests.clients.hooks", "PYTHONPATH": str(FOLDER.parents[1])},
    )
    logged = small_server.logged()
    assert not [line for line in logged if line["event"] == "failed"]
    ours = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
    for path in (*ours, "/api/chat", "/api/generate"):
        done = [line for line in logged if line["event"] == "request" and (line["path"], line["status"]) == (path, 200)]
        assert len(done) >= MAX_EXAMPLES // 4, f"too few requests to {path} were carried out: {len(done)}"
    answer = httpx2.post(
        f"{small_server.url}/v1/completions",
        json={"prompt": "A farmer has", "max_tokens": 4},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert answer.status_code == 200, answer.text
