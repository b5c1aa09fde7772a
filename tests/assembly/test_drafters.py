"""What a drafter outside the target finds out about its model before it says that it is ready."""

from __future__ import annotations

import pytest

from card.assembly.drafters import load_drafter
from card.links.process import DraftModel
from tests.pair import Pair


@pytest.mark.parametrize("has_unknown_target", [True, False])
def test_a_loaded_drafter_says_what_it_is(pair: Pair, has_unknown_target: bool) -> None:
    draft = DraftModel(
        name=pair.draft,
        dtype="float32",
        device="cpu",
        max_model_len=64,
        max_tree_rows=32,
        warm_up_tokens=2,
        kv_cache_bytes=None,
        has_unknown_target=has_unknown_target,
    )
    writer, ready = load_drafter(draft, threads=1)
    assert (ready.vocab_size, ready.max_model_len) == (writer.model.vocab_size, 64)
    assert ready.num_parameters > 0
    assert ready.passes is not None
    assert ready.passes.points[0][0] == 1
    assert ready.passes.per_sequence_s >= 0
    assert ready.passes.per_context_row_s >= 0
    assert (ready.tokenizer is not None) is has_unknown_target
