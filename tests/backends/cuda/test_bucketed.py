"""BucketedRunner against RowRunner: the same logits and KV rows, whatever its shapes and its desk hold."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GemmaConfig, GemmaForCausalLM, MistralConfig, MistralForCausalLM

from card.backends.cuda import graphs
from card.backends.cuda.bucketed import BucketedRunner
from card.backends.cuda.graphs import FetchedTensor, Recorder, StagedTensor, bucket_of
from card.backends.cuda.joined import as_shared
from card.backends.cuda.static_cache import SMALLEST_SPAN, TOKEN_BUCKETS
from card.errors import CapacityError, ModelError
from card.models.protocol import Extension
from card.models.runner import RowRunner
from tests.examples import settings
from tests.static import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    bucketed,
    lane_of,
    make_model,
    operations_of,
    ordinary,
    synchronising,
    tensor_of,
)
from tests.tiny import NO_ENDS, tiny


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(tensor_of(one), tensor_of(other), atol=1e-4, rtol=1e-4)


def assert_desk_is_true(runner: BucketedRunner) -> None:
    """Check that the rows which the desk counts as valid are those of the sequence."""
    assert runner.static is not None
    slot, num_valid = runner.static._slot, runner.static._num_valid
    if slot is not None and num_valid:
        own = runner._cache[slot]
        assert num_valid <= own.tree.num_rows
        assert torch.equal(runner.static._kv[:, :, :, :num_valid], own.kv[:, :, :, :num_valid])


class Twins:
    """Two runners that are told the same; answers are compared."""

    def __init__(self, one: RowRunner, other: BucketedRunner) -> None:
        self.runners = one, other
        self.slots: list[tuple[int, int]] = []

    def open(self, max_rows: int | None = None) -> None:
        one, other = (runner.open(max_rows) for runner in self.runners)
        for runner, slot in zip(self.runners, (one, other), strict=True):
            with torch.inference_mode():
                runner._cache[slot].kv.fill_(math.nan)  # memory that was never written to may hold anything
        self.slots.append((one, other))

    def forward(self, *parts: tuple[int, list[int], list[int], int]) -> None:
        """Each part: which sequence, tokens, parents, first logits."""
        answers = []
        for i, runner in enumerate(self.runners):
            extensions = [Extension(self.slots[n][i], ids, parents, first) for n, ids, parents, first in parts]
            answers.append(runner.forward(extensions))
        for got, expected in zip(*answers, strict=True):
            assert got.shape == expected.shape
            assert_same(got, expected)
        self.check()

    def keep(self, sequence: int, num_prefix_rows: int, rows: list[int]) -> None:
        for runner, slot in zip(self.runners, self.slots[sequence], strict=True):
            runner.keep(slot, num_prefix_rows, rows)
        self.check()

    def renew(self, sequence: int, source: int, num_rows: int) -> None:
        """Close a sequence and open it again with rows of another one."""
        for i, runner in enumerate(self.runners):
            runner.close(self.slots[sequence][i])
        self.open()
        self.slots[sequence] = self.slots.pop()
        for i, runner in enumerate(self.runners):
            runner.copy_rows(self.slots[source][i], self.slots[sequence][i], num_rows)
        self.check()

    def num_rows(self, sequence: int) -> int:
        one, other = (r.num_rows(slot) for r, slot in zip(self.runners, self.slots[sequence], strict=True))
        assert one == other
        return one

    def num_chained(self, sequence: int) -> int:
        return self.runners[0]._cache[self.slots[sequence][0]].tree.num_prefix_rows

    def check(self) -> None:
        assert_desk_is_true(self.runners[1])
        for n, (one, other) in enumerate(self.slots):
            num_rows = self.num_rows(n)
            own, twin = (r._cache[s] for r, s in zip(self.runners, (one, other), strict=True))
            assert own.tree.positions().tolist() == twin.tree.positions().tolist()
            if num_rows:  # a sequence without rows may have no memory
                assert_same(own.kv[:, :, :, :num_rows], twin.kv[:, :, :, :num_rows])

    def close(self) -> None:
        for one, other in self.slots:
            self.runners[0].close(one)
            self.runners[1].close(other)


@pytest.fixture(scope="module")
def runners(device: str) -> tuple[RowRunner, BucketedRunner]:
    return ordinary(device), bucketed(device)


def drawn_extension(data: st.DataObject, twins: Twins, sequence: int) -> tuple[int, list[int], list[int], int]:
    start = twins.num_rows(sequence)
    num_new = data.draw(st.integers(1, 20))
    parents = [
        start + i - 1 if data.draw(st.booleans()) or start + i == 0 else data.draw(st.integers(0, start + i - 1))
        for i in range(num_new)
    ]
    ids = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=num_new, max_size=num_new))
    return sequence, ids, parents, data.draw(st.integers(0, num_new))


@settings(max_examples=25)
@given(data=st.data())
def test_every_pass_equals_that_of_an_ordinary_runner(
    runners: tuple[RowRunner, BucketedRunner], data: st.DataObject
) -> None:
    twins = Twins(*runners)
    twins.open()
    twins.open()
    for _ in range(data.draw(st.integers(2, 8))):
        sequence = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["one", "one", "one", "both", "keep", "renew"])):
            case "one":
                twins.forward(drawn_extension(data, twins, sequence))
            case "both":
                twins.forward(*(drawn_extension(data, twins, n) for n in (0, 1)))
            case "keep":
                num_rows = twins.num_rows(sequence)
                num_prefix = data.draw(st.integers(0, num_rows))
                tree = runners[0]._cache[twins.slots[sequence][0]].tree
                kept: list[int] = []
                for row in range(num_prefix, num_rows):
                    parent = int(tree._parents[row])
                    if (parent < num_prefix or parent in kept) and data.draw(st.booleans()):
                        kept.append(row)
                twins.keep(sequence, num_prefix, kept)
            case "renew":
                twins.renew(sequence, 1 - sequence, data.draw(st.integers(0, twins.num_chained(1 - sequence))))
    twins.close()


@pytest.mark.parametrize("num_new", [1, 2, 3, 5, 8, 9, 31, 64, 65, 200])
def test_a_pass_of_any_size_equals_that_of_an_ordinary_runner(
    runners: tuple[RowRunner, BucketedRunner], num_new: int
) -> None:
    twins = Twins(*runners)
    twins.open()
    twins.forward((0, [i % VOCAB_SIZE for i in range(num_new)], list(range(-1, num_new - 1)), 0))
    twins.forward((0, [7, 8, 9], [num_new - 1, num_new, num_new - 1], 1))
    twins.close()


def test_a_text_is_the_same_up_to_the_last_row_and_position(device: str) -> None:
    settings = {"max_model_len": 300, "max_tree_rows": 4}
    twins = Twins(ordinary(device, **settings), bucketed(device, **settings))
    twins.open()
    twins.forward((0, [5] * 240, list(range(-1, 239)), 240))
    for start in range(240, 297, 3):
        twins.forward((0, [start % VOCAB_SIZE, 1, 2], [start - 1, start, start + 1], 0))
    twins.forward((0, [3, 4], [296, 297], 0))
    twins.forward((0, [1, 2, 3, 4, 5], [298] * 5, 0))  # filled up to 8 tokens, beyond the last row of the sequence
    for slot, runner in zip(twins.slots[0], twins.runners, strict=True):
        with pytest.raises(CapacityError):
            runner.forward([Extension(slot, [1], [3])])
    twins.check()


def test_a_sequence_that_was_opened_for_few_rows_has_no_more(device: str) -> None:
    runner = bucketed(device)
    slot = runner.open(5)
    runner.forward([Extension(slot, [1, 2, 3, 4], [-1, 0, 1, 2])])
    with pytest.raises(CapacityError):
        runner.forward([Extension(slot, [5, 6], [3, 3])])
    assert runner.num_rows(slot) == 4
    assert_desk_is_true(runner)
    again = ordinary(device)
    other = again.open()
    expected = again.forward([Extension(other, [1, 2, 3, 4, 5], [-1, 0, 1, 2, 3], 4)])[0]
    assert_same(runner.forward([Extension(slot, [5], [3])])[0], expected)


def test_a_refused_pass_changes_nothing(runners: tuple[RowRunner, BucketedRunner]) -> None:
    twins = Twins(*runners)
    twins.open()
    twins.forward((0, [1, 2, 3], [-1, 0, 1], 0))
    for ids, parents in (([VOCAB_SIZE], [2]), ([1], [5]), ([1, 2], [2]), ([], [])):
        with pytest.raises(ModelError):
            runners[1].forward([Extension(twins.slots[0][1], ids, parents)])
        twins.check()
    twins.forward((0, [4, 5], [2, 2], 0))
    twins.close()


def test_logits_stay_what_they_are_when_the_next_pass_runs(runners: tuple[RowRunner, BucketedRunner]) -> None:
    runner = runners[1]
    slot = runner.open()
    first = runner.forward([Extension(slot, [1, 2, 3], [-1, 0, 1])])[0]
    before = tensor_of(first)
    runner.forward([Extension(slot, [9, 9, 9], [2, 3, 4])])
    assert torch.equal(tensor_of(first), before)
    runner.close(slot)


def test_shapes_are_few_and_recording_one_in_the_middle_of_a_text_does_no_harm(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "NUM_WARM_UPS_ON_CPU", 2)
    twins = Twins(ordinary(device), bucketed(device))
    twins.open()
    start = 0
    for num_new in (3, 1, 60, 2, 7, 64, 64, 64, 12, 33, 1, 5):
        parents = [start + i - 1 for i in range(num_new)]
        twins.forward((0, [(start + i) % VOCAB_SIZE for i in range(num_new)], parents, 0))
        start += num_new
    shapes = set(twins.runners[1]._passes)
    assert {tokens for tokens, _ in shapes} <= set(TOKEN_BUCKETS)
    assert {span for _, span in shapes} == {SMALLEST_SPAN, 2 * SMALLEST_SPAN}


def test_warming_up_records_the_shapes_of_a_round(device: str) -> None:
    runner = bucketed(device)
    runner.warm_up(9)
    assert {tokens for tokens, _ in runner._passes} == {1, 2, 4, 8, 16}
    recorded = set(runner._passes)
    slot = runner.open()
    runner.forward([Extension(slot, [1] * 9, list(range(-1, 8)))])
    assert set(runner._passes) == recorded


def test_only_passes_over_one_sequence_of_few_tokens_are_recorded(device: str) -> None:
    runner = bucketed(device)
    slots = [runner.open(), runner.open()]
    runner.forward([Extension(slot, [1, 2], [-1, 0]) for slot in slots])
    runner.forward([Extension(slots[0], [1] * 65, list(range(1, 66)))])
    assert not runner._passes
    runner.forward([Extension(slots[1], [3], [1])])
    assert set(runner._passes) == {(1, SMALLEST_SPAN)}


def test_a_pass_reads_nothing_back_and_does_the_same_whatever_it_is_given(device: str) -> None:
    runner = bucketed(device)
    slot = runner.open()
    seen = []
    texts: list[tuple[list[int], list[int]]] = [
        ([1, 2, 3], [-1, 0, 1]),
        ([4, 5, 6, 7], [0, 0, 3, 4]),
        ([8, 9, 1], [2] * 3),
    ]
    for ids, parents in texts:
        runner.forward([Extension(slot, ids, parents)])
        (recorded,) = runner._passes.values()
        seen.append(operations_of(recorded._compute))
        runner.keep(slot, 3)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 20
    assert not synchronising(seen[0])


def test_the_watch_finds_what_reads_back(device: str) -> None:
    tensor, index = torch.ones(3, device=device), torch.arange(3, device=device)
    assert synchronising(operations_of(lambda: bool(tensor.sum() > 0)))
    assert synchronising(operations_of(lambda: tensor[tensor > 0]))
    assert synchronising(operations_of(lambda: tensor.masked_select(tensor > 0)))
    assert not synchronising(operations_of(lambda: (tensor > 0)[index]))


@pytest.mark.parametrize("family", ["sliding", "other"])
def test_models_without_static_passes_run_as_ever(device: str, family: str) -> None:
    sizes = tiny(VOCAB_SIZE, head_dim=8, **NO_ENDS)
    torch.manual_seed(0)
    if family == "sliding":
        model: Any = MistralForCausalLM(MistralConfig(**sizes, sliding_window=5))
    else:
        model = GemmaForCausalLM(GemmaConfig(**sizes))
    with torch.no_grad():
        expected = model.train(False)(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), use_cache=False).logits[0]
    runner = BucketedRunner(model.to(device), max_model_len=32)
    assert runner.static is None
    slot = runner.open()
    runner.forward([Extension(slot, [1, 2, 3, 4], [-1, 0, 1, 2])])
    runner.forward([Extension(slot, [9], [3])])
    runner.keep(slot, 4)
    assert_same(runner.forward([Extension(slot, [5, 6, 7], [3, 4, 5])])[0], expected[4:])
    runner.close(slot)


def test_two_runners_of_one_model_hold_its_weights_once(device: str) -> None:
    model = copy.deepcopy(make_model()).to(device)  # type: ignore[arg-type]
    first, second = (BucketedRunner(model, max_model_len=64) for _ in range(2))
    for one, other in zip(first._decoder._layers, second._decoder._layers, strict=True):  # type: ignore[union-attr]
        assert one.qkv[0].data_ptr() == other.qkv[0].data_ptr() == one.qkv[0].untyped_storage().data_ptr()
        assert one.gate_up[0].data_ptr() == other.gate_up[0].data_ptr()
        assert torch.equal(one.qkv[0], other.qkv[0])
    logits = [runner.forward([Extension(runner.open(), [1, 2, 3], [-1, 0, 1])])[0] for runner in (first, second)]
    assert torch.equal(*map(tensor_of, logits))
    runner = ordinary(device)
    assert_same(logits[0], runner.forward([Extension(runner.open(), [1, 2, 3], [-1, 0, 1])])[0])


def test_weights_that_lie_in_another_order_are_not_taken_for_joined_ones() -> None:
    both = torch.arange(12.0).view(4, 3)
    one, other = both[:2], both[2:]
    joined = as_shared([one, other])
    assert joined is not None
    assert torch.equal(joined, both)
    for weights in ([other, one], [one, other.clone()], [one, one], [both[:1], both[2:]], [both[:2, :2], both[2:, :2]]):
        assert as_shared(weights) is None


def test_lent_rows_leave_the_sequence_alone_and_adopted_ones_are_its_own(
    runners: tuple[RowRunner, BucketedRunner],
) -> None:
    runner = runners[1]
    slot = runner.open()
    runner.forward([Extension(slot, [1, 2, 3], [-1, 0, 1])])
    visible = runner.lend(slot, [2, 0, 2])
    assert runner.num_rows(slot) == 3
    assert visible.tolist() == [
        [True, True, True, True, False, False],
        [True, False, False, False, True, False],
        [True, True, True, False, False, True],
    ]
    assert runner.static is not None
    with torch.inference_mode():
        runner.static._kv[:, :, :, 3:6] = 0.5
    runner.adopt(slot, [2, 0, 2])
    assert runner._cache[slot].tree.positions().tolist() == [0, 1, 2, 3, 1, 3]
    assert torch.equal(runner._cache[slot].kv[:, :, :, 3:6], runner.static._kv[:, :, :, 3:6])
    assert_desk_is_true(runner)
    runner.close(slot)


def test_a_bucket_is_the_smallest_that_holds_the_count() -> None:
    assert [bucket_of(n, TOKEN_BUCKETS) for n in (1, 2, 3, 33, 64, 65)] == [1, 2, 4, 64, 64, None]
    assert MAX_MODEL_LEN > SMALLEST_SPAN, "so that the tests above meet more than one span"


def test_copies_between_host_and_device_hold_what_was_there_when_they_were_begun(device: str) -> None:
    staged = StagedTensor((2, 3), torch.int64, torch.device(device))
    fetched = [FetchedTensor(staged.tensor) for _ in range(2)]
    values = [np.arange(6).reshape(2, 3) + 10 * i for i in range(2)]
    for target, value in zip(fetched, values, strict=True):
        staged.fill(value)
        target.begin(staged.tensor)
    assert [copy.read().tolist() for copy in fetched] == [value.tolist() for value in values]
    first = fetched[0].read()
    fetched[0].begin(staged.tensor)
    assert first.tolist() == values[0].tolist(), "what was read belongs to the reader"


def test_a_recorded_step_does_what_the_function_does(device: str) -> None:
    where = torch.device(device)
    x, y = torch.zeros(4, device=where), torch.zeros(4, device=where)

    def step() -> None:
        y.copy_(2 * x + 1)
        x.add_(1)

    with torch.inference_mode():
        replay = Recorder(where).record(step)
        x.zero_()
        replay()
        replay()
    assert (x.tolist(), y.tolist()) == ([2.0] * 4, [3.0] * 4)


def test_work_inside_a_lane_is_done_before_what_follows_outside(device: str) -> None:
    lane = lane_of(device)
    before = torch.full((1000,), 2.0, device=device)
    with lane.entered():
        inside = before * 3
    assert (inside + 1).sum().item() == 7000.0
