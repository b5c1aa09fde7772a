"""`card generate --method arbitrage` shares an answer between both models, and says that it is not plain decoding."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands import run_command
from tests.pair import Pair

SHORT = ("--dtype", "float32", "--max-tokens", "24")


@pytest.fixture
def models(pair: Pair) -> tuple[str, ...]:
    return ("--target", pair.target, "--draft", pair.draft, *SHORT)


def facts(capfd: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    ran = run_command(capfd, "generate", "--json", *args, "the cat sat")
    assert ran.status == 0, ran.err
    return dict(json.loads(ran.out))


def test_a_router_that_always_takes_the_target_writes_the_targets_own_text(
    capfd: pytest.CaptureFixture[str], models: tuple[str, ...]
) -> None:
    plain = facts(capfd, *models[:2], *SHORT, "--method", "vanilla")
    stepped = facts(capfd, *models, "--method", "arbitrage", "--router", "entropy:0")
    assert stepped["exact"] and stepped["draft_tokens"] == 0
    for name in ("text", "token_ids", "finish_reason"):
        assert stepped[name] == plain[name]


def test_a_router_that_always_takes_the_draft_model_writes_its_text_and_no_result_is_called_exact(
    capfd: pytest.CaptureFixture[str], models: tuple[str, ...], pair: Pair
) -> None:
    alone = facts(capfd, "--target", pair.draft, *SHORT, "--method", "vanilla")
    drafted = facts(capfd, *models, "--method", "arbitrage", "--router", "random:1")
    assert drafted["text"] == alone["text"] and drafted["target_tokens"] == 0
    for router in ("random:1", "oracle"):
        found = facts(capfd, *models, "--method", "arbitrage", "--router", router)
        assert found["exact"] is False and (found["method"], found["router"]) == ("arbitrage", router)
        assert "".join(step["text"] for step in found["steps"]) == found["text"]


def test_steps_stream_and_stats_say_who_wrote(capfd: pytest.CaptureFixture[str], models: tuple[str, ...]) -> None:
    text = facts(capfd, *models, "--method", "arbitrage")["text"]
    ran = run_command(capfd, "generate", "--stats", *models, "--method", "arbitrage", "the cat sat")
    assert ran.out == text + "\n"
    assert "arbitrage: 24 tokens, steps of the target" in ran.err and "exact: false" in ran.err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["generate", "--method", "arbitrage", "--router", "magic", "hi"], "unknown router 'magic'; known: entropy"),
        (["generate", "--method", "arbitrage", "--router", "random:x", "hi"], "must be a number, got 'x'"),
        (["generate", "--method", "arbitrage", "--router", "random:2", "hi"], "must be from 0 to 1"),
        (["generate", "--router", "random", "hi"], "--router is of --method arbitrage"),
        (["generate", "--method", "arbitrage", "--raw", "hi"], "--raw does not go with --method arbitrage"),
        (["generate", "--method", "arbitrage", "--stop", "y", "hi"], "--stop looks back to where an answer begins"),
        (["generate", "--method", "arbitrage", "--draft-address", "tcp://x:1", "hi"], "not --draft-address"),
        (["generate", "--method", "arbitrage", "--target", "x", "hi"], "needs a draft model"),
        (
            ["chat", "--method", "arbitrage"],
            "use card generate --method arbitrage, or card.steps.Arbitrage in Python",
        ),
        (["serve", "--method", "arbitrage"], "use card generate --method arbitrage"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], args: list[str], reason: str, pair: Pair
) -> None:
    ran = run_command(capfd, *[pair.target if one == "x" else one for one in args])
    assert ran.status == 2 and reason in ran.err and ran.err.count("\n") == 1 and ran.out == ""
