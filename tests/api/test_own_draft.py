"""A block that drafts is tried where no draft model is named, by one rule for Python, command line and server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from card import LLM, SamplingParams
from card.cli.main import cli
from card.errors import CardError
from tests.own_block import random_checkpoint

PROMPT = "the cat sat"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 100}
DAMAGED = {"mtp.fc.weight": torch.zeros(64, 96)}
FLAGS = ("--max-tokens", "8", "--raw", "--temperature", "0", "--dtype", "float32", "--max-model-len", "100")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a block."""
    return random_checkpoint("qwen3_5").save(tmp_path_factory.mktemp("whole") / "target")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same target, whose block has a weight of another shape."""
    return random_checkpoint("qwen3_5").save(tmp_path_factory.mktemp("damaged") / "target", changes=DAMAGED)


@pytest.fixture(scope="module")
def plain(whole: str) -> Sequence[int]:
    """What plain decoding writes."""
    with LLM(whole, method="vanilla", **SETTINGS) as llm:
        return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("method", [None, "card", "sps"])
def test_a_block_drafts_where_no_draft_model_is_named(
    whole: str, plain: Sequence[int], method: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "card.api"), LLM(whole, method=method, **SETTINGS) as llm:
        assert (llm.method.name, llm.settings.draft) == (method or "card", "mtp")
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain
    assert caplog.text.count(f"the block that drafts in {whole} is tried; method suffix does without") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "vanilla"},
        {"method": "suffix"},
        {"writers": ("suffix",)},
    ],
)
def test_a_block_stays_out_where_settings_ask_for_something_else(whole: str, changes: dict[str, Any]) -> None:
    with LLM(whole, **SETTINGS, **changes) as llm:
        assert (llm.method.name, llm.settings.draft) == (changes.get("method", "suffix"), None)


def test_a_damaged_block_is_left_out_with_a_warning(
    damaged: str, plain: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(damaged, **SETTINGS) as llm:
        assert (llm.method.name, llm.settings.draft, llm.host.link) == ("suffix", None, None)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain
    (record,) = (one for one in caplog.records if one.name == "card.api.own_draft")
    assert record.levelno == logging.WARNING
    assert "mtp.fc.weight has shape [64, 96]" in record.getMessage()
    assert record.getMessage().endswith("so method suffix drafts from the text itself")


@pytest.mark.parametrize("asked", [{"draft": "mtp"}, {"method": "card"}])
def test_a_damaged_block_is_an_error_where_a_draft_model_is_asked_for(damaged: str, asked: dict[str, str]) -> None:
    with pytest.raises(CardError, match=r"mtp\.fc\.weight has shape"):
        LLM(damaged, **SETTINGS, **asked)


def test_a_damaged_block_of_a_gguf_file_is_left_out(tmp_path: Path, whole: str) -> None:
    checkpoint, file = random_checkpoint("qwen3_5"), tmp_path / "target.gguf"
    checkpoint.save_gguf(Path(whole), file, without=["blk.4.nextn.hnorm.weight"])
    with LLM(str(file), **SETTINGS, cache=False) as llm:
        assert llm.method.name == "suffix"
        assert "its tensor blk.4.nextn.hnorm.weight is missing" in llm.host.draft_note


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "card: no draft model is given, so the block that drafts in {} is tried; --method suffix does without\n"),
        (("--draft", "none"), ""),
    ],
)
def test_a_command_says_it_in_one_line(whole: str, flags: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(cli, ["generate", "--target", whole, *FLAGS, *flags, PROMPT])
    assert done.exit_code == 0, done.output
    assert ("drafts" in done.stderr) == bool(words)
    assert words.format(whole) in done.stderr
