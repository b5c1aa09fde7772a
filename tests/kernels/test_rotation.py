"""Tables of rotary embeddings: those of the mathematical libraries, with bits that depend on no library."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from card.kernels.rotation import attention_factor, inverse_frequencies, rotation_tables

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


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.01 * idx for idx in range(64)],
    "long_factor": [1.0 + 0.7 * idx for idx in range(64)],
    "original_max_position_embeddings": 1024,
}
LONGEST = 4096  # positions of the model


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
        YARN,
        YARN | {"truncate": False},
        YARN | {"beta_fast": 64.0, "beta_slow": 0.5},
        YARN | {"beta_fast": None, "beta_slow": 0, "attention_factor": 1.3},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        YARN | {"mscale": 0.7},
        YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False},
        YARN | {"factor": 1.0},
        YARN | {"factor": None},
        YARN | {"original_max_position_embeddings": 4},  # no channel turns as often as they ask for
        YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [8, 128])
def test_angles_are_those_of_transformers_but_for_rounding(rope: dict[str, Any], size: int) -> None:
    sizes = {"hidden_size": 4 * size, "num_attention_heads": 4, "max_position_embeddings": LONGEST}
    config = LlamaConfig(**sizes, rope_parameters=dict(rope))
    theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    np.testing.assert_allclose(inverse_frequencies(rope, size, LONGEST), theirs.numpy(), rtol=1e-6)
    assert attention_factor(rope, LONGEST) == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize("changes", [{}, {"factor": 32.0}, {"factor": 0.5}, {"attention_factor": 1.19}], ids=str)
@pytest.mark.parametrize("is_long", [False, True])
def test_texts_of_both_lengths_have_the_angles_of_transformers(changes: dict[str, Any], is_long: bool) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": LONGEST}
    rope = LONG_ROPE | changes
    config = LlamaConfig(**sizes, rope_parameters=dict(rope))
    theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=1024 + is_long)
    found = inverse_frequencies(rope, 128, LONGEST, is_long=is_long)
    np.testing.assert_allclose(found, theirs.numpy(), rtol=1e-6)
    assert attention_factor(rope, LONGEST) == pytest.approx(factor, rel=1e-14)


def test_other_types_are_left_to_transformers() -> None:
    assert inverse_frequencies({"rope_type": "dynamic", "rope_theta": 10000.0}, 64, LONGEST) is None


@pytest.mark.parametrize(
    ("rope", "scale", "digest"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, 1.19, "50f355328ba9dd6c"),
        (YARN | {"factor": 40.0, "truncate": False}, None, "38827aa9cfbbd239"),
    ],
)
def test_bits_are_those_of_every_computer(rope: dict[str, Any], scale: float | None, digest: str) -> None:
    frequencies = inverse_frequencies(rope, 128, LONGEST)
    assert frequencies is not None
    sums = hashlib.sha256(frequencies.astype("<f4").tobytes())
    for table in rotation_tables(frequencies, 4096, scale or attention_factor(rope, LONGEST)):
        sums.update(table.astype("<f4").tobytes())
    assert sums.hexdigest()[:16] == digest
