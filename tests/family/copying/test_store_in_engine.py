"""The writer store in an engine: made for its target, refused without a path, and closed with the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import card.assembly.build as building
from card.assembly.build import make_writers
from card.assembly.plan import resolve
from card.errors import SettingsError
from tests.assembly.test_build import TARGET, built
from tests.assembly.test_plan import TWO_CORES
from tests.decoding import make_request, run_all
from tests.gguf_files import demo_tokenizer


def test_a_start_compares_tokens_only_for_writers_that_outlive_it(tmp_path: Path, monkeypatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(building, "tokenizer_fingerprint", lambda one: made.append(one) or "its tokens")
    store = {"suffix_store": str(tmp_path / "texts")}
    for writers, settings, num_made in ((("suffix", "lookup"), {}, 0), (("store", "suffix"), store, 1)):
        plan = resolve({"writers": writers, **settings}, TWO_CORES, method="card")
        for writer in make_writers(plan, TARGET.vocab_size, demo_tokenizer()).values():
            writer.close()
        assert len(made) == num_made


def test_settings_that_a_writer_cannot_follow_are_refused() -> None:
    plan = resolve({"writers": ("suffix", "store"), "policy": "fixed"}, replace(TWO_CORES, has_draft=False))
    with pytest.raises(SettingsError, match="set suffix_store to its path"):
        built(plan)


def test_an_engine_that_is_closed_has_stored_its_texts(tmp_path: Path) -> None:
    settings = {"writers": ("beam", "store"), "suffix_store": str(tmp_path / "texts"), "policy": "fixed"}
    parts = built(resolve(settings, TWO_CORES))
    run_all(parts.engine, {0: [make_request(1)]})
    parts.close()
    assert list(parts.writers) == ["store"]
    again = built(parts.plan)
    assert again.writers["store"].indexes[1].num_tokens > 0, "the text was stored"  # type: ignore[attr-defined]
    again.close()
