"""A model that lies in a folder is known by its name: where it lies is nobody's business."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from card.server.config import known_as
from tests.pair import Pair
from tests.server.running import PATIENCE_S, command

pytestmark = pytest.mark.timeout(240)

OPEN = ("/health", "/health/ready", "/metrics", "/version", "/load", "/openapi.json", "/")


def test_no_answer_says_in_which_folder_a_model_lies(pair: Pair, tmp_path: Path) -> None:
    options = (pair.target, "--draft-model", pair.draft, "--dtype", "float32", "--threads", "1", "--policy", "fixed")
    with (
        command(tmp_path, *options, "--placement", "inline") as server,
        httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        told = {path: client.get(path).text for path in (*OPEN, "/v1/models", "/v1/models/nobody")}
        for name in ("", Path(pair.target).name, pair.target):  # the last one for clients that know it
            body = {"model": name, "prompt": "the cat", "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200, name
    for path, text in told.items():
        assert str(Path(pair.target).parent) not in text, path
        assert str(Path(pair.draft).parent) not in text, path
    assert f'"id":"{Path(pair.target).name}"' in told["/v1/models"]


def test_names_of_a_hub_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for source, name in (("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("demo-target", "demo-target")):
        assert known_as(source) == name
    assert known_as(str(tmp_path / "model.gguf")) == "model.gguf"
    assert known_as("/gone/model/") == "model"
    assert known_as(".") == Path.cwd().name
