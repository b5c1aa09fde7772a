"""Logits on a device: the same tokens as from arrays, and no copy of them where the device itself can choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from card.backends.transformers.arrays import TensorLogits, as_logits
from card.config import SamplingParams, SamplingRule
from card.errors import ModelError
from card.models.protocol import Extension
from card.tree.logits import DeviceLogits, as_array
from card.tree.sampling import Sampler
from tests.decoding import decode, inline, toy_draft, toy_target
from tests.toy import TableModel

GREEDY = SamplingParams(temperature=0.0, seed=3, max_tokens=24)
GREEDY_RULE = SamplingRule.of(GREEDY.resolved())
CHANGES = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"presence_penalty": 0.8, "repetition_penalty": 1.2},
    "biased": {"logit_bias": {3: 2.0, 5: -2.0}},
    "with logprobs": {"logprobs": 3},
}


class Copied(TensorLogits):
    """Counts the rows that are copied to the CPU."""

    rows = 0

    def __getitem__(self, rows: slice) -> Copied:
        return Copied(self._logits[rows])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        Copied.rows += len(self)
        return super().__array__(dtype, copy)


class OnDevice(TableModel):
    """Leaves its logits where a device would."""

    def forward(self, extensions: Sequence[Extension]) -> list[Any]:
        return [Copied(torch.from_numpy(logits)) for logits in super().forward(extensions)]


def on_device() -> OnDevice:
    return OnDevice(0, vocab_size=12, order=2, spread=1.5, max_model_len=128, num_tree_rows=512)


@pytest.fixture(autouse=True)
def no_copies() -> None:
    Copied.rows = 0


@pytest.mark.parametrize("method", ["vanilla", "card"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_text_is_the_same_whether_logits_are_arrays_or_lie_on_a_device(method: str, changes: dict[str, Any]) -> None:
    draft = toy_draft(toy_target(), agreement=0.6)
    texts = [
        decode(target, inline(draft) if method == "card" else None, method=method, params=GREEDY.replace(**changes))[0]
        for target in (toy_target(), on_device())
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("changes", "is_copied"), [({}, False), ({"logprobs": 0}, True), ({"temperature": 1.0}, True)])
def test_greedy_rows_are_chosen_on_the_device_and_others_are_copied(changes: dict[str, Any], is_copied: bool) -> None:
    decode(on_device(), None, method="vanilla", params=GREEDY.replace(**changes))
    assert (Copied.rows > 0) is is_copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numpy_reads_rows_of_any_dtype_and_the_first_of_equal_ones_is_chosen(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.5, 2.0, 2.0, -1.0], [3.0, 3.0, 3.0, 3.0]], dtype=dtype)
    logits = TensorLogits(tensor)
    assert isinstance(logits, DeviceLogits)
    assert logits.shape == (2, 4) and len(logits[1:]) == 1
    assert as_array(logits).dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert as_array(logits).tolist() == tensor.tolist()
    sampler = Sampler(GREEDY_RULE, 4)
    assert sampler.choose(logits, [5, 6]) == sampler.choose(as_array(logits), [5, 6]) == [1, 0]
    assert logits.likeliest() == ([1, 0], [2.0, 3.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_on_a_device_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ModelError, match="NaN"):
        Sampler(GREEDY_RULE, 3).choose(TensorLogits(torch.tensor([[0.0, bad, 1.0]])), [0])


def test_only_logits_on_another_device_than_the_cpu_stay_there() -> None:
    assert isinstance(as_logits(torch.zeros(2, 3)), np.ndarray)
    assert isinstance(as_logits(torch.zeros(2, 3, device="meta")), TensorLogits)
