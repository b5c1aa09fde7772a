"""Short convolutions on the exact pass: a row's sums go through its own ancestors, whatever was run or dropped."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Lfm2Config, Lfm2ForCausalLM

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.machine.threads import integer_passes_on
from card.models.protocol import Extension, Recurrent, Stateful
from card.models.recording_runner import RecordingRunner
from card.models.rows.pool import SequencePool
from card.models.rows.records import BLOCK_ROWS
from card.models.runners import how_it_runs, plain_runner
from tests.reaching_in import cache_of
from tests.recordings import (
    AROUND_LANDMARK,
    TEXT,
    TREE_ROWS,
    VOCAB,
    AtOnce,
    check_copy_before_landmark,
    check_rows_put_back,
    made_noisy,
)
from tests.tiny import CLEAR, NO_ENDS, tiny

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
KINDS = ["conv", "full_attention", "conv", "conv", "full_attention"]


@functools.cache
def model_of(noise: float = 0.0, num_taps: int = 3) -> Lfm2ForCausalLM:
    torch.manual_seed(1)
    config = Lfm2Config(
        **tiny(
            VOCAB, hidden_size=72, num_hidden_layers=len(KINDS), max_position_embeddings=256, initializer_range=CLEAR
        ),
        **NO_ENDS,
        layer_types=KINDS,
        conv_L_cache=num_taps,
        block_multiple_of=16,
    )
    return made_noisy(Lfm2ForCausalLM(config).eval(), noise)


def make_runner(noise: float = 0.0, num_taps: int = 3, max_tree_rows: int = TREE_ROWS) -> RecordingRunner:
    model = copy.deepcopy(model_of(noise, num_taps))
    runner = plain_runner(model, max_model_len=200, max_tree_rows=max_tree_rows)
    assert isinstance(runner, RecordingRunner)
    return runner


@functools.cache
def runner_of(num_taps: int = 3) -> RecordingRunner:
    return make_runner(num_taps=num_taps)


@functools.cache
def at_once(num_taps: int = 3) -> AtOnce:
    return AtOnce(lambda: make_runner(num_taps=num_taps, max_tree_rows=256))


goes_on = at_once().goes_on


@pytest.mark.parametrize("num_taps", [2, 3, 5])
def test_logits_and_greedy_tokens_are_those_of_transformers(num_taps: int) -> None:
    at_once(num_taps).check_against(copy.deepcopy(model_of(num_taps=num_taps)))


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), num_threads=st.sampled_from([1, 2, 3]))
def test_passes_of_any_size_fill_the_ring_with_the_same_records(sizes: list[int], num_threads: int) -> None:
    runner, done, parts = runner_of(), 0, list[Floats]()
    slot = runner.open()
    with integer_passes_on(num_threads):
        for size in [*sizes, len(TEXT)]:
            if piece := TEXT[done : done + size]:
                parts.append(runner.forward([Extension.of_text(slot, TEXT[: done + size], done, first_logits=done)])[0])
                done += len(piece)
    runner.close(slot)
    assert np.array_equal(np.concatenate(parts), at_once().logits(TEXT))


@pytest.mark.parametrize("num_taps", [2, 3, 5])
@given(data=st.data())
def test_a_text_goes_on_behind_any_rows_that_are_kept(num_taps: int, data: st.DataObject) -> None:
    at_once(num_taps).check_trees(runner_of(num_taps), data)


@pytest.mark.parametrize("num_taps", [2, 3, 5])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 31, 32, 33, 64, 95, 119, 120])
def test_any_beginning_of_a_text_is_lent(num_rows: int, num_taps: int) -> None:
    runner = runner_of(num_taps)
    source, slot = runner.open(), runner.open(num_rows + 2)
    runner.forward([Extension.of_text(source, TEXT[:120])])
    reached = runner.lendable_rows(source, num_rows)
    assert reached == (num_rows if num_rows >= 120 - TREE_ROWS else num_rows // BLOCK_ROWS * BLOCK_ROWS)
    runner.copy_rows(source, slot, num_rows)
    assert runner.num_rows(slot) == num_rows
    assert at_once(num_taps).goes_on(runner, slot, TEXT[:num_rows])
    assert at_once(num_taps).goes_on(runner, source, TEXT[:120])
    for one in (source, slot):
        runner.close(one)


@pytest.mark.parametrize("num_rows", [1, 31, 64, 90, 120])
def test_rows_that_were_taken_out_are_put_back_with_their_records(num_rows: int) -> None:
    check_rows_put_back(runner_of(), num_rows, at_once().goes_on)


@pytest.mark.parametrize("num_rows", AROUND_LANDMARK)
def test_a_copy_that_ends_where_a_landmark_begins_fills_it(num_rows: int) -> None:
    check_copy_before_landmark(make_runner(), num_rows, at_once().goes_on)


def test_more_candidates_than_the_records_have_room_for_are_refused_before_anything_moves() -> None:
    runner = runner_of()
    slot = runner.open()
    runner.forward([Extension.of_text(slot, TEXT[:9])])
    tokens = list(range(TREE_ROWS + 3))
    runner.forward([Extension(slot, [7, *tokens], [8] * (len(tokens) + 1))])
    with pytest.raises(ModelError, match="states behind rows below"):
        runner.keep(slot, 9, [10])
    assert runner.num_rows(slot) == 9 + len(tokens) + 1
    runner.keep(slot, 9)
    assert at_once().goes_on(runner, slot, TEXT[:9])
    runner.close(slot)


def test_a_sequence_takes_its_rows_a_ring_of_records_and_a_landmark_for_each_block() -> None:
    runner, num_conv, padded = make_runner(), KINDS.count("conv"), 80  # a width of 72, in panels
    record = num_conv * padded * 4
    keys = KINDS.count("full_attention") * 2 * 2 * 32 * 4  # heads of 18, in vectors
    assert runner.state_bytes == (TREE_ROWS + 2) * record
    assert runner.row_bytes == keys + 2 * record // BLOCK_ROWS + 4
    cache = cache_of(runner)
    slot = runner.open(64)
    assert cache.held_bytes([slot]) == 64 * runner.row_bytes + runner.state_bytes
    pool = SequencePool(runner, 10 * (64 * runner.row_bytes + runner.state_bytes))
    pool.open([], 64)
    assert pool.stats.used_bytes == 64 * runner.row_bytes + runner.state_bytes


def test_users_are_told_of_trees_and_records() -> None:
    runner = runner_of()
    assert isinstance(runner, Stateful) and not isinstance(runner, Recurrent)
    assert how_it_runs(runner) == "own pass in float32; trees of candidates; 0.0 MB of records a request"
