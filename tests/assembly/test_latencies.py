"""What is known of passes: who waits for the drafter, and what a start leaves for the next one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from card.assembly.drafters import Drafter
from card.assembly.latencies import MeasuredLatencies
from card.assembly.plan import Facts, resolve
from card.latency import measuring
from card.models.torch_runner import TorchRunner
from tests.assembly.test_plan import TWO_CORES, cost
from tests.pair import Pair
from tests.shortage import no_more_files
from tests.tiny import tiny_llama

RUNNER = TorchRunner(tiny_llama(32), max_model_len=64)
REPORTED = cost(0.5)


# A drafter elsewhere that has said what its passes cost.
REPORTING = Drafter(SimpleNamespace(ready=SimpleNamespace(passes=REPORTED)))  # type: ignore[arg-type]


def latencies(folder: Path, settings: dict[str, Any], facts: Facts = TWO_CORES, method: str = "card") -> Any:
    given = {"target": "a target", "draft": "a draft", "cache_dir": str(folder), "threads": 1, **settings}
    plan = resolve(given, facts, method=method)
    return plan, MeasuredLatencies(plan, RUNNER, is_target_named=True, is_draft_named=True)


@pytest.mark.parametrize(
    ("method", "settings", "waits"),
    [
        ("card", {}, False),
        ("card", {"wait_for_drafter": True}, True),
        ("card", {"policy": "fixed"}, True),
        ("card", {"policy": "fixed", "wait_for_drafter": False}, False),
        ("card", {"draft_address": "tcp://127.0.0.1:1", "draft_optional": True}, False),
        ("card", {"draft_address": "tcp://127.0.0.1:1"}, True),
        ("card", {"schedule": "beside"}, True),
        ("pearl", {}, True),
    ],
)
def test_a_drafter_is_waited_for_where_nothing_can_be_done_without_it(
    tmp_path: Path, method: str, settings: dict[str, Any], waits: bool
) -> None:
    facts = Facts() if "draft_address" in settings else TWO_CORES
    assert latencies(tmp_path, settings, facts, method)[1].waits_for_drafter is waits


def test_what_a_drafter_in_another_process_says_is_known_at_the_next_start(tmp_path: Path) -> None:
    beside = {"schedule": "beside"}
    plan, first = latencies(tmp_path, beside)
    assert not first.knows_drafter
    assert first.drafter(plan, "beside") is None
    first.ask(REPORTING)
    assert first.drafter(plan, "beside") == REPORTED
    first.remember_drafter()
    plan, second = latencies(tmp_path, beside)
    assert second.knows_drafter
    assert not second.waits_for_drafter, "the policy can weigh it by now"
    assert not latencies(tmp_path, {**beside, "cache": False})[1].knows_drafter


def test_a_target_that_has_its_threads_set_keeps_them(tmp_path: Path) -> None:
    plan, told = latencies(tmp_path, {})
    assert told.with_useful_threads(plan.cores) is plan.cores


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), MemoryError(), RuntimeError("can't start new thread"), KeyError("x")]
)
def test_measuring_again_that_fails_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    plan, told = latencies(tmp_path, {})
    told.target(plan, "off")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(measuring, "measure_pass_cost", fail)
    upkeep = told.remeasure()
    assert [next(upkeep, None) for _ in range(3)] == [None, None, None], "as its driver asks, more than once"
    (line,) = caplog.messages
    assert line.startswith(f"latencies are not measured again: {type(error).__name__}")


def test_without_files_to_open_it_is_measured_again_all_the_same(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's files are not looked at again, which may be others by now."""
    plan, told = latencies(tmp_path, {"target": pair.target})
    told.target(plan, "off")
    upkeep = told.remeasure()
    with no_more_files():
        assert len(list(upkeep)) == 1
    assert caplog.messages == []
    assert list(told.remeasure()) == []
