"""Tables of rotary embeddings: those of the mathematical libraries, with bits that depend on no library."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from card.kernels.rotation import inverse_frequencies, rotation_tables

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_angles_far_out_have_the_cosines_and_sines_of_exact_arithmetic() -> None:
    frequencies = np.array([1.0, 0.731, 1e-5], np.float32)
    cos, sin = rotation_tables(frequencies, 200_000)
    angles = (np.arange(200_000, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=3.1e-8)  # half of the last bit of 32
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=3.1e-8)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, LLAMA3], ids=lambda rope: rope["rope_type"]
)
def test_frequencies_are_those_of_transformers_up_to_their_last_bits(rope: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(rope))
    theirs, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    np.testing.assert_allclose(inverse_frequencies(rope, 128), theirs.numpy(), rtol=3e-7)


def test_other_types_are_left_to_transformers() -> None:
    assert inverse_frequencies({"rope_type": "yarn", "rope_theta": 10000.0}, 64) is None


def test_bits_are_those_of_every_computer() -> None:
    frequencies = inverse_frequencies({"rope_type": "default", "rope_theta": 1e6}, 128)
    assert frequencies is not None
    sums = hashlib.sha256(frequencies.astype("<f4").tobytes())
    for table in rotation_tables(frequencies, 4096, 1.19):
        sums.update(table.astype("<f4").tobytes())
    assert sums.hexdigest()[:16] == "50f355328ba9dd6c"
