"""Features of recorded passes, with graphs that are really captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from card.models.features import FeatureWish
from card.models.protocol import Extension
from tests.static import bucketed, ordinary

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


def test_recorded_passes_leave_the_features_of_ordinary_ones(device: str) -> None:
    recorded, plain = bucketed(device), ordinary(device)
    slots = [runner.open() for runner in (recorded, plain)]
    recorded.forward([Extension(slots[0], TEXT[:4], range(-1, 3))])  # without features: to be recorded anew
    plain.forward([Extension(slots[1], TEXT[:4], range(-1, 3))])
    start = 4
    both, last = FeatureWish((0, 1), "all"), FeatureWish((-1,), "logits")
    for wishes, sizes in (([both, last], (4, 1, 1)), ([last], (1, 1))):
        for runner in (recorded, plain):
            runner.features.wish(wishes)
        for num_new in sizes:
            ids, parents = TEXT[start : start + num_new], range(start - 1, start - 1 + num_new)
            for runner, slot in zip((recorded, plain), slots, strict=True):
                runner.forward([Extension(slot, ids, parents)])
            for wish in wishes:
                found, expected = (runner.features.of(0, wish) for runner in (recorded, plain))
                np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
            start += num_new
