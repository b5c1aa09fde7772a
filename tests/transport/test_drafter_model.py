"""What a drafter outside the target finds out about its model before it says that it is ready."""

from __future__ import annotations

import itertools

import pytest

from card.models.toy import TableModel
from card.transport import drafter_model
from card.transport.drafter_model import DraftModel, load_drafter, measure_passes
from tests.pair import Pair


def test_passes_of_a_few_sizes_are_measured_and_leave_no_rows() -> None:
    model = TableModel(0, max_model_len=20)
    measured = measure_passes(model)
    assert [num_tokens for num_tokens, _ in measured] == [1, 4, 8, 16], "32 do not fit"
    assert all(seconds > 0 for _, seconds in measured)
    assert model.num_forward_passes == 4 * 3
    assert not model._sequences


def test_a_slow_model_is_measured_at_fewer_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(drafter_model.time, "perf_counter", lambda: 0.05 * next(ticks))
    assert measure_passes(TableModel(0)) == ((1, pytest.approx(0.05)),)


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
    writer, ready = load_drafter(draft)
    assert (ready.vocab_size, ready.max_model_len) == (writer.model.vocab_size, 64)
    assert ready.num_parameters > 0
    assert ready.pass_s[0][0] == 1
    assert bool(ready.tokenizer) is has_unknown_target
