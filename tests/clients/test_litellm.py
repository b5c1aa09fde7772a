"""LiteLLM's router falls back to a model with a larger context where a prompt does not fit, by both of its prefixes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.running import FOLDER, KEY, run_client
from tests.server.running import Command, command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

PYTHON = FOLDER.parents[1] / ".venv-litellm" / "bin" / "python"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    options = ("demo-target", "--dtype", "float32", "--max-model-len", "128", "--served-model-name", "small-model")
    with command(tmp_path_factory.mktemp("small"), *options, env={"CARD_API_KEY": KEY}) as running:
        yield running


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    options = ("demo-target", "--dtype", "float32", "--served-model-name", "large-model")
    with command(tmp_path_factory.mktemp("large"), *options, env={"CARD_API_KEY": KEY}) as running:
        yield running


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm"])
def test_a_prompt_that_is_too_long_goes_to_the_model_with_the_larger_context(
    small: Command, large: Command, prefix: str, tmp_path: Path
) -> None:
    assert PYTHON.is_file(), "LiteLLM is not installed; run make test-clients"
    script = str(FOLDER / "litellm" / "fall_back.py")
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    printed = run_client(str(PYTHON), script, prefix, small.url, large.url, KEY, folder=tmp_path, env=offline)
    told = json.loads(printed.splitlines()[-1])
    assert told.pop("alone") == "ContextWindowExceededError"
    names = {question: name.rpartition("/")[2] for question, name in told.items()}
    wanted = dict.fromkeys(("short", "short streamed", "history"), "small-model")
    assert names == wanted | dict.fromkeys(("long", "long streamed"), "large-model")
