"""A server without llguidance says so as it starts, answers what needs no grammar, and 501 to what does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.running import PATIENCE_S, command

pytestmark = pytest.mark.timeout(240)

MESSAGES = [{"role": "user", "content": "Anna has 2 cats."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "[xy]{3}"}}),
    ("tools", {"tools": [TOOL], "tool_choice": "required"}),
)


def test_a_server_without_the_library_of_grammars_says_so_and_answers_501_without_naming_its_folders(
    tmp_path: Path,
) -> None:
    options = ("demo-target", "--method", "vanilla", "--dtype", "float32", "--policy", "fixed", "--threads", "1")
    with command(tmp_path, *options, before="sys.modules['llguidance'] = None") as server:
        (told,) = [line for line in server.logged() if line["event"] == "llguidance is not installed"]
        assert "[serve]" in told["hint"]
        with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            for field, form in FORMS:
                answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8, **form})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"], error["code"]) == (501, field, "no_grammars")
                assert "pip" not in error["message"]
                assert str(Path(__file__).parents[2]) not in error["message"]
            plain = client.post("/v1/completions", json={"prompt": "the cat", "max_tokens": 2})
            assert plain.status_code == 200
