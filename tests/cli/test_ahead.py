"""Which options lead to a drafter's process that is worth starting before anything is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest

from card.cli.parts import starting

TWO_CORES = {0, 1}


class Started:
    """In place of a process: the threads that it was started for."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "DrafterChild", Started)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: TWO_CORES, raising=False)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("card", {"placement": "process", "schedule": "beside"}),
        ("card", {"schedule": "beside"}),
        ("card", {"policy": "fixed"}),
        ("card", {"schedule": "beside", "writers": ("beam", "suffix"), "draft_threads": 1}),
        ("pearl", {}),
    ],
)
def test_a_process_is_started_where_the_drafter_will_have_one(method: str, options: dict[str, Any]):
    started = starting.start_drafter_child(method, "demo-draft", options)
    assert started is not None
    assert started.num_threads == 1


@pytest.mark.parametrize(
    ("method", "draft", "options"),
    [
        ("card", "demo-draft", {}),  # whether it will have one is measured
        ("card", "demo-draft", {"schedule": "turns"}),
        ("card", "demo-draft", {"placement": "inline"}),
        ("card", "demo-draft", {"policy": "fixed", "placement": "thread"}),
        ("pearl", None, {}),
        ("pearl", "demo-draft", {"device": "cuda"}),
        ("pearl", "demo-draft", {"draft_device": "cuda:1"}),
        ("pearl", "demo-draft", {"draft_address": "tcp://127.0.0.1:5555"}),
        ("card", "demo-draft", {"schedule": "beside", "writers": ("suffix",)}),
        ("pearl", "demo-draft", {"draft_threads": 2}),
        ("sps", "demo-draft", {}),
    ],
)
def test_none_is_started_where_it_would_end_unused(method: str, draft: str | None, options: dict[str, Any]):
    assert starting.start_drafter_child(method, draft, options) is None
