"""The drafter drafts where torch and transformers cannot be imported."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from card.models.fingerprint import embedding_probe, sizes_of
from card.models.loading import load_decoder
from card.models.own.fused_head import FUSED_FILE, FUSED_TYPE, FUSED_WEIGHTS, FusedFacts, weight_shapes
from card.models.runners import plain_runner
from tests.alone import text_of


def test_text_is_written_with_a_drafter(tmp_path: Path) -> None:
    target = plain_runner(load_decoder("demo-target"), max_model_len=64)
    facts = FusedFacts(num_steps=3, width=64, num_layers=2, **sizes_of(target))
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(0, 0.1, shape).astype(np.float16) for name, shape in weight_shapes(facts).items()}
    arrays |= {"token_ids": np.arange(9, dtype=np.int32), "probe": embedding_probe(target)}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": FUSED_TYPE}))
    FUSED_FILE.save(tmp_path / FUSED_WEIGHTS, arrays, {name: str(value) for name, value in asdict(facts).items()})
    assert text_of("--method", "sps", "--draft", str(tmp_path)) == text_of("--method", "vanilla")
