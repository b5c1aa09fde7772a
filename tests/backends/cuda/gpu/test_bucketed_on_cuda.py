"""The tests of passes in fixed shapes, and of what carries them, with graphs that are really captured."""

from __future__ import annotations

import pytest
import torch

from card.models.protocol import Extension
from tests.backends.cuda.test_bucketed import *  # noqa: F403 - the same tests, on the device below
from tests.static import bucketed, lane_of, ordinary, tensor_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


def test_a_recorded_pass_runs_without_waiting_for_the_device(device: str) -> None:
    runner = bucketed(device)
    slot = runner.open()
    runner.forward([Extension(slot, [1, 2, 3], [-1, 0, 1])])
    (recorded,) = runner._passes.values()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            recorded._compute()
            recorded._replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_pass_equals_its_function(device: str) -> None:
    runner = bucketed(device)
    slot = runner.open()
    for ids, parents in (([1, 2, 3], [-1, 0, 1]), ([4, 5, 6], [2, 2, 4])):
        logits = runner.forward([Extension(slot, ids, parents)])[0]
        (recorded,) = runner._passes.values()
        with torch.inference_mode():
            recorded._compute()
        torch.testing.assert_close(tensor_of(recorded._logits[:3]), tensor_of(logits), atol=1e-5, rtol=1e-5)


def test_in_bfloat16_a_recorded_pass_differs_from_an_ordinary_one_by_rounding_only(device: str) -> None:
    logits = []
    for make in (ordinary, bucketed):
        runner = make(device, dtype=torch.bfloat16)
        slot = runner.open()
        runner.forward([Extension(slot, list(range(40)), range(-1, 39), 40)])
        logits.append(runner.forward([Extension(slot, [1, 2, 3], [39, 40, 39])])[0])
    one, other = map(tensor_of, logits)
    assert (one - other).abs().max() <= 0.05 * one.abs().max()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_device_is_used_from_its_own_lane() -> None:
    lane = lane_of("cuda:1")
    with lane.entered():
        runner = bucketed("cuda:1")
        slot = runner.open()
        got = runner.forward([Extension(slot, [1, 2, 3], [-1, 0, 1])])[0]
    reference = ordinary("cpu")
    expected = reference.forward([Extension(reference.open(), [1, 2, 3], [-1, 0, 1])])[0]
    torch.testing.assert_close(tensor_of(got), tensor_of(expected), atol=1e-3, rtol=1e-3)
