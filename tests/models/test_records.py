"""Short convolutions on the exact pass: a row's sums go through its own ancestors, whatever was run or dropped."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

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
from tests.landmark_copies import AROUND_LANDMARK, check_copy_before_landmark
from tests.reaching_in import cache_of
from tests.tiny import CLEAR, NO_ENDS, tiny

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
VOCAB, TREE_ROWS = 61, 12
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(150)]
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
    model = Lfm2ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0 if weight.dim() > 1 else 1.0)
            weight.add_(noise * weight.std(unbiased=False) * torch.randn_like(weight))
    return model


def make_runner(noise: float = 0.0, num_taps: int = 3, max_tree_rows: int = TREE_ROWS) -> RecordingRunner:
    model = copy.deepcopy(model_of(noise, num_taps))
    runner = plain_runner(model, max_model_len=200, max_tree_rows=max_tree_rows)
    assert isinstance(runner, RecordingRunner)
    return runner


@functools.cache
def runner_of(num_taps: int = 3) -> RecordingRunner:
    return make_runner(num_taps=num_taps)


@functools.cache
def plain_logits(token_ids: tuple[int, ...], num_taps: int = 3) -> Floats:
    """Return the logits of a text that is read at once, in a runner that has room for all its records."""
    runner = roomy(num_taps)
    slot = runner.open()
    (logits,) = runner.forward([Extension.of_text(slot, token_ids, first_logits=0)])
    runner.close(slot)
    return np.array(logits)


@functools.cache
def roomy(num_taps: int) -> RecordingRunner:
    return make_runner(num_taps=num_taps, max_tree_rows=256)


def goes_on(runner: RecordingRunner, slot: int, token_ids: Sequence[int], num_taps: int = 3) -> bool:
    """Return whether a sequence that holds a text goes on as if it had been read at once."""
    more = [*token_ids, 5, 6]
    (found,) = runner.forward([Extension.of_text(slot, more, len(token_ids), first_logits=-2)])
    return np.array_equal(found, plain_logits(tuple(more), num_taps)[-2:])


@pytest.mark.parametrize("num_taps", [2, 3, 5])
def test_logits_and_greedy_tokens_are_those_of_transformers(num_taps: int) -> None:
    model = copy.deepcopy(model_of(num_taps=num_taps))
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0].numpy()
    assert np.abs(plain_logits(tuple(TEXT), num_taps) - expected).max() < 1e-4 * np.abs(expected).max()
    ids = torch.tensor([TEXT[:9]])
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    assert plain_logits(tuple(written), num_taps)[8:-1].argmax(-1).tolist() == written[9:]


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
    assert np.array_equal(np.concatenate(parts), plain_logits(tuple(TEXT)))


@pytest.mark.parametrize("num_taps", [2, 3, 5])
@given(data=st.data())
def test_a_text_goes_on_behind_any_rows_that_are_kept(num_taps: int, data: st.DataObject) -> None:
    """Trees are rejected or accepted in part, texts are cut anywhere, and then go on."""
    runner = runner_of(num_taps)
    slot, text = runner.open(), TEXT[: data.draw(st.integers(1, 100))]
    runner.forward([Extension.of_text(slot, text)])
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            text = text[: data.draw(st.integers(1, len(text)))]
            runner.keep(slot, len(text))
            continue
        num_nodes = data.draw(st.integers(1, TREE_ROWS))
        parents = [data.draw(st.integers(-1, idx - 1)) for idx in range(num_nodes)]
        tokens = [data.draw(st.integers(0, VOCAB - 1)) for _ in range(num_nodes)]
        (found,) = runner.forward([Extension(slot, tokens, [len(text) + parent for parent in parents])])
        path, node = list[int](), data.draw(st.integers(-1, num_nodes - 1))
        while node >= 0:
            path, node = [node, *path], parents[node]
        kept = [tokens[node] for node in path]
        if path:
            assert np.array_equal(found[path[-1]], plain_logits((*text, *kept), num_taps)[-1])
        runner.keep(slot, len(text), [len(text) + node for node in path])
        text = [*text, *kept]
    assert goes_on(runner, slot, text, num_taps)
    runner.close(slot)


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
    assert goes_on(runner, slot, TEXT[:num_rows], num_taps)
    assert goes_on(runner, source, TEXT[:120], num_taps)
    for one in (source, slot):
        runner.close(one)


@pytest.mark.parametrize("num_rows", [1, 31, 64, 90, 120])
def test_rows_that_were_taken_out_are_put_back_with_their_records(num_rows: int) -> None:
    runner = runner_of()
    source, slot = runner.open(), runner.open(num_rows + 2)
    runner.forward([Extension.of_text(source, TEXT[:num_rows])])
    rows = runner.read_rows(source)
    runner.close(source)
    runner.write_rows(slot, rows)
    again = runner.open()
    runner.copy_rows(slot, again, num_rows // 2)
    assert goes_on(runner, slot, TEXT[:num_rows])
    assert goes_on(runner, again, TEXT[: num_rows // 2])
    for one in (slot, again):
        runner.close(one)


@pytest.mark.parametrize("num_rows", AROUND_LANDMARK)
def test_a_copy_that_ends_where_a_landmark_begins_fills_it(num_rows: int) -> None:
    check_copy_before_landmark(make_runner(), TEXT, num_rows, goes_on)


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
    assert goes_on(runner, slot, TEXT[:9])
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
