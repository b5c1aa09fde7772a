"""The delta rule on the exact pass: a state for the text that is kept, records of rows behind it, the same bits."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.machine.threads import integer_passes_on
from card.models.protocol import Extension, Recurrent, Stateful
from card.models.recording_runner import RecordingRunner
from card.models.runners import how_it_runs, plain_runner
from tests.reaching_in import cache_of, interrupt_passes
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
BLOCK = 32
HEADS, KEYS, SIZE = 4, 2, 16  # of the delta rule, and their channels
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]


@functools.cache
def model_of(noise: float = 0.0) -> Qwen3_5ForCausalLM:
    torch.manual_seed(1)
    config = Qwen3_5TextConfig(
        **tiny(
            VOCAB, hidden_size=72, num_hidden_layers=len(KINDS), max_position_embeddings=256, initializer_range=CLEAR
        ),
        **NO_ENDS,
        head_dim=24,
        layer_types=KINDS,
        linear_num_key_heads=KEYS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=SIZE,
        linear_value_head_dim=SIZE,
    )
    return made_noisy(Qwen3_5ForCausalLM(config).eval(), noise)


def make_runner(noise: float = 0.0, max_tree_rows: int = TREE_ROWS) -> RecordingRunner:
    runner = plain_runner(copy.deepcopy(model_of(noise)), max_model_len=200, max_tree_rows=max_tree_rows)
    assert isinstance(runner, RecordingRunner)
    return runner


@functools.cache
def runner_of() -> RecordingRunner:
    return make_runner()


AT_ONCE = AtOnce(lambda: make_runner(max_tree_rows=256))
goes_on = AT_ONCE.goes_on


def state_of(runner: RecordingRunner, slot: int) -> Floats:
    records = cache_of(runner)[slot].records
    assert records is not None
    return records.state


def num_absorbed(runner: RecordingRunner, slot: int) -> int:
    records = cache_of(runner)[slot].records
    assert records is not None
    return records.num_absorbed


@pytest.mark.parametrize("num_rows", AROUND_LANDMARK)
def test_a_copy_that_ends_where_a_landmark_begins_fills_it(num_rows: int) -> None:
    check_copy_before_landmark(make_runner(), num_rows, goes_on)


def test_logits_and_greedy_tokens_are_those_of_transformers() -> None:
    AT_ONCE.check_against(copy.deepcopy(model_of()))


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    num_threads=st.sampled_from([1, 2, 3]),
    is_told=st.booleans(),
    with_logits=st.booleans(),
)
@example(sizes=[4, 5], num_threads=1, is_told=True, with_logits=True)  # the ring grew and lost rows that waited
def test_passes_of_any_size_lead_to_the_same_bits(
    sizes: list[int], num_threads: int, is_told: bool, with_logits: bool
) -> None:
    """Whether rows are absorbed at once, when the caller says that they are text, or when there is no room for them."""
    runner, done = runner_of(), 0
    slot = runner.open()
    with integer_passes_on(num_threads):
        for size in [*sizes, len(TEXT)]:
            if not TEXT[done : done + size]:
                continue
            first = done if with_logits else -1
            (found,) = runner.forward([Extension.of_text(slot, TEXT[: done + size], done, first_logits=first)])
            done = min(done + size, len(TEXT))
            assert np.array_equal(found, AT_ONCE.logits(TEXT)[done - len(found) : done])
            if is_told:
                runner.keep(slot, done)
    assert len(TEXT) - num_absorbed(runner, slot) <= TREE_ROWS + 3
    runner.close(slot)


@given(data=st.data())
def test_a_text_goes_on_behind_any_rows_that_are_kept(data: st.DataObject) -> None:
    AT_ONCE.check_trees(runner_of(), data)


def test_a_rejected_tree_leaves_the_state_and_an_accepted_one_is_absorbed_with_the_next_pass() -> None:
    runner = runner_of()
    slot = runner.open()
    runner.forward([Extension.of_text(slot, TEXT[:40])])
    runner.keep(slot, 40)
    runner.forward([Extension(slot, [TEXT[40], 3, 4, 5], [39, 40, 40, 42])])
    assert num_absorbed(runner, slot) == 40
    before = state_of(runner, slot).copy()
    runner.keep(slot, 41)
    runner.forward([Extension(slot, [3, 4, 5], [40, 40, 42])])
    assert num_absorbed(runner, slot) == 41
    assert not np.array_equal(state_of(runner, slot), before)
    before = state_of(runner, slot).copy()
    runner.keep(slot, 41, [42, 43])
    assert np.array_equal(state_of(runner, slot), before)
    assert goes_on(runner, slot, [*TEXT[:41], 4, 5])
    runner.close(slot)


def test_only_the_rows_in_doubt_go_on_from_the_state() -> None:
    """A pass of a text that is known takes no step but those of its own rows."""
    runner = runner_of()
    slot = runner.open()
    for length in range(1, 80):
        runner.forward([Extension.of_text(slot, TEXT[:length], length - 1)])
        assert length - num_absorbed(runner, slot) <= 33
    runner.keep(slot, 79)
    runner.forward([Extension.of_text(slot, TEXT[:80], 79)])
    assert num_absorbed(runner, slot) == 79
    runner.close(slot)


def test_a_chain_that_was_drafted_token_by_token_is_dropped_without_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, depth = make_runner(max_tree_rows=40), 24
    slot = runner.open()
    runner.forward([Extension.of_text(slot, TEXT[:41])])
    runner.keep(slot, 41)
    for row in range(41, 41 + depth):
        runner.forward([Extension(slot, [(TEXT[row] + 1) % VOCAB], [row - 1])])
    forward, num_passes = runner.forward, 0

    def counted(extensions: Sequence[Extension]) -> list[Floats]:
        nonlocal num_passes
        num_passes += 1
        return forward(extensions)

    monkeypatch.setattr(runner, "forward", counted)
    runner.keep(slot, 41)
    assert num_passes == 0
    assert goes_on(runner, slot, TEXT[:41])
    runner.close(slot)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 8, 31, 32, 33, 64, 95, 119, 120])
def test_any_beginning_of_a_text_is_lent(num_rows: int) -> None:
    runner = runner_of()
    source, slot = runner.open(), runner.open(num_rows + 2)
    runner.forward([Extension.of_text(source, TEXT[:120])])
    assert runner.lendable_rows(source, num_rows) == (num_rows if num_rows >= 119 else num_rows // BLOCK * BLOCK)
    runner.copy_rows(source, slot, num_rows)
    assert runner.num_rows(slot) == num_rows
    assert goes_on(runner, slot, TEXT[:num_rows])
    assert goes_on(runner, source, TEXT[:120])
    for one in (source, slot):
        runner.close(one)


def test_a_prompt_is_lent_though_much_was_written_behind_it() -> None:
    """Its end is a landmark, whatever follows; so the next text that begins with it need not read it again."""
    runner = runner_of()
    source, slot = runner.open(), runner.open()
    runner.forward([Extension.of_text(source, TEXT[:30])])
    runner.forward([Extension.of_text(source, TEXT[:44], 30)])
    for length in range(45, 75):
        runner.forward([Extension.of_text(source, TEXT[:length], length - 1)])
        runner.keep(source, length)
    assert runner.lendable_rows(source, 60) == 43
    assert runner.lendable_rows(source, 43) == 43
    assert runner.lendable_rows(source, 42) == 32
    rows = runner.read_rows(source)
    runner.write_rows(slot, rows)
    assert runner.lendable_rows(slot, 60) == 43
    runner.keep(source, 43)
    assert goes_on(runner, source, TEXT[:43])
    runner.keep(slot, 40)
    assert runner.lendable_rows(slot, 40) == 40
    assert goes_on(runner, slot, TEXT[:40])
    for one in (source, slot):
        runner.close(one)


@pytest.mark.parametrize("num_rows", [1, 31, 64, 90, 120])
def test_rows_that_were_taken_out_are_put_back_with_their_state(num_rows: int) -> None:
    check_rows_put_back(runner_of(), num_rows, goes_on)


def test_a_pass_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    slot, other = runner.open(), runner.open()
    runner.forward([Extension.of_text(slot, TEXT[:50]), Extension.of_text(other, TEXT[3:20])])
    for _ in range(2):
        with monkeypatch.context() as patch:
            interrupt_passes(patch, runner)
            with pytest.raises(KeyboardInterrupt):
                runner.forward([Extension.of_text(slot, TEXT[:90], 50), Extension.of_text(other, TEXT[3:30], 17)])
    assert runner.num_rows(slot) == 50
    assert len(runner.read_rows(slot)) == (50 * runner.row_bytes + runner.state_bytes) // 4
    assert goes_on(runner, slot, TEXT[:50])
    assert goes_on(runner, other, TEXT[3:20])


def test_a_token_below_a_row_whose_state_is_gone_is_refused() -> None:
    runner = runner_of()
    slot = runner.open()
    runner.forward([Extension.of_text(slot, TEXT[:50])])
    runner.keep(slot, 50)
    runner.forward([Extension(slot, [3, 4], [49, 50])])
    with pytest.raises(ModelError, match="states before it are gone"):
        runner.forward([Extension(slot, [3], [20])])
    runner.keep(slot, 50)
    assert goes_on(runner, slot, TEXT[:50])
    runner.close(slot)


def test_a_sequence_takes_its_rows_one_state_and_records() -> None:
    runner = make_runner()
    num_delta, conv = KINDS.count("linear_attention"), (2 * KEYS + HEADS) * SIZE
    record = num_delta * (conv + KEYS * SIZE + HEADS * SIZE + 16) * 4  # decays of the heads fill a vector
    state = num_delta * HEADS * SIZE * SIZE * 4
    keys = KINDS.count("full_attention") * 2 * 2 * 32 * 4  # heads of 24, in vectors
    landmark = 3 * record + state
    assert runner.state_bytes == (TREE_ROWS + 3) * record + state + landmark + 16
    assert runner.row_bytes == keys + 4 * -(-landmark // (4 * BLOCK)) + 4
    assert runner.row_bytes - 4 <= 2 * keys
    slot = runner.open(64)
    assert cache_of(runner).held_bytes([slot]) == 64 * runner.row_bytes + runner.state_bytes


def test_a_ring_of_records_takes_as_many_places_as_rows_are_in_doubt() -> None:
    runner = make_runner(max_tree_rows=60)
    slot = runner.open()
    records = cache_of(runner)[slot].records
    assert records is not None
    for length in (30, *range(31, 75)):
        held = runner.num_rows(slot)
        runner.forward([Extension.of_text(slot, TEXT[:length], held)])
        runner.keep(slot, length)
    assert len(records.ring) == 63
    assert records.num_places == 8
    tree = Extension(slot, [1] * 21, [73, *[74] * 20])
    for _ in range(2):
        runner.forward([tree])
        assert records.num_places == 24
        assert not records.ring[24:].any()
        runner.keep(slot, 74)
    assert goes_on(runner, slot, TEXT[:74])
    other = runner.open()
    runner.copy_rows(slot, other, 64)
    assert goes_on(runner, other, TEXT[:64])
    for one in (slot, other):
        runner.close(one)


def test_users_are_told_of_trees_and_states() -> None:
    runner = runner_of()
    assert isinstance(runner, Stateful) and not isinstance(runner, Recurrent)
    assert how_it_runs(runner) == "own pass in float32; trees of candidates; 0.1 MB of a state and records a request"


# ---- every kind of kernels ------------------------------------------------------------------------------------------


def digest() -> str:
    """Return a digest of what texts, trees and what follows them give, and passes in which a ring of records grows."""
    runner, sums = runner_of(), hashlib.sha256()
    slot = runner.open()
    for first, end in ((0, 4), (4, 9), (9, len(TEXT))):
        (found,) = runner.forward([Extension.of_text(slot, TEXT[:end], first, first_logits=first)])
        assert np.array_equal(found, AT_ONCE.logits(TEXT[:end])[first:])
        runner.keep(slot, end)
    runner.close(slot)
    slot = runner.open()
    for extension in (
        Extension.of_text(slot, TEXT[:70], first_logits=0),
        Extension(slot, [1, 2, 3, 4, 5], [69, 70, 70, 72, 69]),
    ):
        sums.update(np.ascontiguousarray(runner.forward([extension])[0]).tobytes())
    runner.keep(slot, 70, [70, 72])
    sums.update(np.ascontiguousarray(runner.forward([Extension(slot, [9], [71])])[0]).tobytes())
    runner.close(slot)
    return sums.hexdigest()
