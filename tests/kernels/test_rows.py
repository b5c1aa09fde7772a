"""Functions of vectors of 16 floats are those of numpy and of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
activate: Any = machine_code("passes").activate if REASON is None else None


def activate_here(x: int, factor: int, activation: int) -> None:
    activate(x, factor, activation)


def test_the_clamped_gate_is_that_of_transformers() -> None:
    generator, code = np.random.default_rng(0), machine_code("vectors")
    gate, up = (generator.standard_normal(64).astype(np.float32) * 8 for _ in range(2))
    gate[:8], up[4:12] = (
        [-100.0, -60.0, -7.0, 0.0, 6.9, 7.0, 7.1, 100.0],
        [-100.0, -7.1, -7.0, -1.0, 0.0, 7.0, 7.1, 100.0],
    )
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=16, intermediate_size=16))
    woven = torch.from_numpy(np.stack([gate, up], axis=-1).reshape(-1)).double()
    expected = experts._apply_gate(woven).numpy()
    code.entered(activate_here)(gate.ctypes.data, up.ctypes.data, machine_code("tables").CLAMPED)
    np.testing.assert_allclose(gate, expected, rtol=2e-6, atol=1e-30)
