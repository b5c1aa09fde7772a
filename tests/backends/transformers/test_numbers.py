"""A model that transformers' modules run is refused at the load for a weight that is no number, by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from card.backends.transformers import loading
from card.errors import ModelError
from card.kernels.number_types import Array, has_nan
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from tests.backends.transformers.test_hybrid import model_of
from tests.models.test_torch_runner import make_model

# Families without an own pass: attention alone, experts in one weight, states beside it and without it.
KINDS: dict[str, tuple[Callable[[str], Any], torch.dtype]] = {
    "minicpm3": (make_model, torch.bfloat16),
    "llama4": (make_model, torch.float32),
    "zamba2": (model_of, torch.float16),
    "mamba": (model_of, torch.bfloat16),
}


def saved(kind: str, folder: Path, wrong: str | None = None) -> Any:
    """Save a model of a kind, with one number of a weight replaced by NaN; return the model."""
    make, dtype = KINDS[kind]
    model = make(kind)
    weights: dict[str, Tensor] = {name: one.to(dtype) for name, one in model.state_dict().items()}
    if wrong is not None:
        weights[wrong] = weights[wrong].clone()
        weights[wrong].reshape(-1)[-1] = float("nan")
    model.save_pretrained(folder, state_dict=weights)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_no_number_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "right")
    loaded: Any = load_decoder(tmp_path / "right")
    assert not isinstance(loaded, DecoderModel), "a family that has an own pass by now is no example"
    for name in {one.dim(): name for name, one in loaded.named_parameters()}.values():  # one of each form
        saved(kind, tmp_path / name, name)
        with pytest.raises(ModelError, match=f"{name} holds NaN") as refused:
            load_decoder(tmp_path / name)
        assert str(tmp_path / name) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_each_weight_is_looked_at_once_for_each_state_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "model", str(tmp_path / "cache")
    sizes = [one.numel() for one in saved("mamba", folder).parameters()]
    looked = list[int]()

    def look(numbers: Array) -> bool:
        looked.append(numbers.size)
        return has_nan(numbers)

    monkeypatch.setattr(loading, "has_nan", look)
    load_decoder(folder, cache_dir=cache)
    assert looked == sizes
    load_decoder(folder, cache_dir=cache)
    assert looked == sizes, "what has passed is not looked at again"
    saved("mamba", folder, "backbone.norm_f.weight")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"backbone\.norm_f\.weight holds NaN"):
            load_decoder(folder, cache_dir=cache)
