"""What is known of passes: who waits for the drafter, and what a start leaves for the next one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from card.assembly.drafters import Drafter
from card.assembly.latencies import MeasuredLatencies
from card.assembly.plan import Facts, resolve
from card.models.runners import plain_runner
from tests.assembly.test_plan import TWO_CORES, cost
from tests.tiny import tiny_llama

RUNNER = plain_runner(tiny_llama(32), max_model_len=64)
REPORTED = cost(0.5)


# A drafter elsewhere that has said what its passes cost.
REPORTING = Drafter(SimpleNamespace(ready=SimpleNamespace(passes=REPORTED)))  # type: ignore[arg-type]


def latencies(folder: Path, settings: dict[str, Any], facts: Facts = TWO_CORES, method: str = "card") -> Any:
    draft = None if "draft_address" in settings else "a draft"
    given = {"target": "a target", "draft": draft, "cache_dir": str(folder), "threads": 1, **settings}
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
    assert told.with_useful_threads(plan.cores) == plan.cores
