"""The drafter drafts where torch and transformers cannot be imported."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from card.family.hivis.fused import HEAD_FILE, FusedFacts
from card.models.fingerprint import embedding_probe, sizes_of
from card.models.loading import load_decoder
from card.models.runners import plain_runner
from tests.alone import text_of


def test_text_is_written_with_a_drafter(tmp_path: Path) -> None:
    target = plain_runner(load_decoder("demo-target"), max_model_len=64)
    facts = FusedFacts(num_steps=3, width=64, **sizes_of(target))
    draw = np.random.default_rng(0)
    arrays = {name: draw.normal(0, 0.1, shape).astype(np.float16) for name, shape in facts.shapes.items()}
    arrays |= {"token_ids": np.arange(9, dtype=np.int32), "probe": embedding_probe(target)}
    file = tmp_path / "drafter.safetensors"
    HEAD_FILE.save(file, arrays, {name: str(value) for name, value in asdict(facts).items()})
    assert text_of("--method", "hivis", "--hivis", str(file)) == text_of("--method", "vanilla")
