"""A start with the block of a GGUF file reads neither its header nor its weights again: an earlier start kept them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from card.models.block_loading import has_block, load_block
from card.models.files.gguf import block_weights, model
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from card.models.own.draft_block import DraftBlock
from card.models.own.layers import BlockWeight
from card.models.runners import plain_runner
from tests.own_block import random_checkpoint

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.F32])
@pytest.mark.parametrize("in_own_file", [False, True])
def test_a_second_start_reads_no_header_and_packs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, in_own_file: bool
) -> None:
    checkpoint, cache = random_checkpoint("glm4_moe"), str(tmp_path / "cache")
    folder = Path(checkpoint.save(tmp_path / "folder"))
    target = checkpoint.save_gguf(folder, tmp_path / "target.gguf", kind=kind)
    block = target
    if in_own_file:
        block = checkpoint.save_block_file(folder, tmp_path / "mtp.gguf", kind=kind, ids=range(50, 150))
    first = _loaded(target, block, cache)

    def fail(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(model, "read_header", fail)
    monkeypatch.setattr(block_weights, "pack_blocks", fail)
    assert has_block(target, cache_dir=cache)
    again = _loaded(target, block, cache)
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    assert (first.inputs.rows([3, 9, 4], rows) == again.inputs.rows([3, 9, 4], rows)).all()
    for (name, one), (other_name, other) in zip(first.weights, again.weights, strict=True):
        assert name == other_name
        assert type(one) is type(other)
        numbers, others = (weight.data if isinstance(weight, BlockWeight) else weight for weight in (one, other))
        assert (np.asarray(numbers) == np.asarray(others)).all()


def _loaded(target: str, block: str, cache: str) -> DraftBlock:
    loaded = load_decoder(target, cache_dir=cache)
    assert isinstance(loaded, DecoderModel)
    runner, model_head = plain_runner(loaded, max_model_len=64), loaded.lm_head.weight
    return load_block(block, runner, dtype="auto", cache_dir=cache, head=model_head)
