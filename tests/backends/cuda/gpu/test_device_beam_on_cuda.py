"""The tests of beams on the device, with steps that are really captured and copies that are really asynchronous."""

from __future__ import annotations

import pytest
import torch

from card.backends.cuda.device_beam import DeviceBeamWriter
from tests.backends.cuda.test_device_beam import *  # noqa: F403 - the same tests, on the device below
from tests.backends.cuda.test_device_beam import LAWS, TEXT
from tests.drafts import draft_spec
from tests.static import bucketed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


@pytest.mark.parametrize("law", sorted(LAWS))
def test_steps_follow_each_other_without_waiting_for_the_device(device: str, law: str) -> None:
    writer = DeviceBeamWriter(bucketed(device))
    beam = writer.open(TEXT, draft_spec(beam_width=4, branch=4, **LAWS[law]), epoch=0)
    for _ in range(3):
        writer.step([(beam, beam.num_tokens_to_run())])
    (step,) = writer._steps.values()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            step._compute()
            fetched = [step.launch() for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(step.result(one).tokens) == 4 for one in fetched)
