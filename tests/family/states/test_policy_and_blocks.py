"""The policy ends a block that is never right, and keeps one that is, where both would cost next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from card import LLM, SamplingParams
from card.assembly import drafters
from card.assembly.latency import measuring
from card.machine.pass_cost import PassCost
from card.models.runner import RowRunner
from tests.own_block import random_checkpoint, right_checkpoint

pytestmark = pytest.mark.timeout(240)


def _stated(runner: RowRunner, *_: Any, **__: Any) -> PassCost:
    seconds = 1e-2 if runner.block_inputs is None else 1e-4
    return PassCost(((1, seconds), (64, 1.01 * seconds)))


@pytest.mark.parametrize("is_right", [False, True])
def test_a_bad_block_is_ended_and_a_good_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    monkeypatch.setattr(measuring, "measure_pass_cost", _stated)
    monkeypatch.setattr(drafters, "measure_pass_cost", _stated)
    target = (right_checkpoint("state") if is_right else random_checkpoint()).save(tmp_path / "target")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "cache": False, "placement": "inline"}
    with LLM(target, "mtp", writers=("beam",), **settings) as llm:
        stats = llm.generate("one two three", params)[0].stats
    assert stats.schedule == ("turns" if is_right else "off")
    assert (stats.drafter_passes > 100) is is_right
    assert stats.drafter_passes > 0, "it is tried"
    if not is_right:
        assert stats.drafter_passes <= 30
