"""Logits of models with experts and heads of newer kinds are those of transformers' own forward, biases and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from card.models.protocol import Extension
from card.models.runners import plain_runner

WITH_BIASES = ("glm4_moe", "glm4_moe, norms of heads", "dots1", "ernie4_5_moe", "minimax_m2")
KINDS = (*WITH_BIASES, "ministral3", "granitemoeshared", "olmo3", "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss")
KINDS += ("ernie4_5",)
TOKEN_IDS = [3 + 7 * i * i % 90 for i in range(40)]


def own_logits(folder: Path) -> np.ndarray[Any, Any]:
    """Return our logits [T, V] of the text."""
    model = load_decoder(folder)
    assert type(model) is DecoderModel
    runner = plain_runner(model, max_model_len=64)
    (logits,) = runner.forward([Extension.of_text(runner.open(), TOKEN_IDS, first_logits=0)])
    return np.array(logits)


def their_logits(folder: Path, *, biases: bool = True) -> np.ndarray[Any, Any]:
    """Return transformers' logits [T, V] of the text; without ``biases`` experts are chosen by scores alone."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, numbers in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias") and not biases:
                numbers.zero_()
        logits: np.ndarray[Any, Any] = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(folders, kind):
    own, theirs = own_logits(folders(kind)), their_logits(folders(kind))
    np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert (own.argmax(-1) == theirs.argmax(-1)).all()


@pytest.mark.parametrize("kind", WITH_BIASES)
def test_these_models_choose_other_experts_without_their_biases(folders, kind):
    with_biases, without = (their_logits(folders(kind), biases=biases) for biases in (True, False))
    assert np.abs(with_biases - without).max() > 0.01 * np.abs(with_biases).max()
