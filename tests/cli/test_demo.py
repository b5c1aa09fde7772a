"""What the demo computes in, and what it says of it."""

from __future__ import annotations

import pytest

from card.cli import demo
from card.cli.options import DEMO_DRAFT, DEMO_TARGET


def test_the_demo_pair_runs_in_integers_where_they_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "why_not_int8", lambda: None)
    dtype, told = demo.choose_dtype("auto", "cpu", DEMO_TARGET, DEMO_DRAFT)
    assert dtype == "int8"
    assert "8-bit integers" in told
    assert demo.choose_dtype("bfloat16", "cpu", DEMO_TARGET, DEMO_DRAFT) == ("bfloat16", "")
    assert demo.choose_dtype("auto", "cuda", DEMO_TARGET, DEMO_DRAFT) == ("auto", "")
    assert demo.choose_dtype("auto", "cpu", "a/folder", DEMO_DRAFT) == ("auto", ""), "a named model stays as stored"
    monkeypatch.setattr(demo, "why_not_int8", lambda: "too old")
    assert demo.choose_dtype("auto", "cpu", DEMO_TARGET, DEMO_DRAFT) == ("auto", "")
