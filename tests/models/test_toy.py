"""The table model keeps the contract of `LanguageModel` and is the same function everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.errors import CapacityError, ModelError, SettingsError, VocabularyError
from card.kernels.number_types import Floats
from card.models.protocol import NO_PARENT, Extension, LanguageModel
from tests.toy import TableModel

V = 8


def chain(slot: int, token_ids: list[int], first_row: int = 0, first_logits_idx: int = 0) -> Extension:
    return Extension(
        slot, token_ids, [row - 1 for row in range(first_row, first_row + len(token_ids))], first_logits_idx
    )


def held_paths(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """Return the path to each row, by the plainest means."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent != NO_PARENT else []), token])
    return paths


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    tokens = draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=14))
    parents = [NO_PARENT] + [draw(st.integers(max(0, row - 4), row - 1)) for row in range(1, len(tokens))]
    return tokens, parents


def test_it_is_a_language_model() -> None:
    model: LanguageModel = TableModel(0, V, max_model_len=20, num_tree_rows=5)
    assert (model.vocab_size, model.max_model_len, model.max_rows) == (V, 20, 25)


@given(tree=trees(), seed=st.integers(0, 2**31), order=st.integers(1, 3), data=st.data())
def test_logits_depend_only_on_the_path_however_the_rows_arrive(tree, seed, order, data) -> None:
    tokens, parents = tree
    model = TableModel(seed, V, order)
    other_slot, slot = model.open(), model.open()
    model.forward([chain(other_slot, [1, 2, 3])])
    got: list[Floats] = []
    while len(got) < len(tokens):
        start, stop = len(got), data.draw(st.integers(len(got) + 1, len(tokens)))
        first = data.draw(st.integers(0, stop - start))
        (logits,) = model.forward([Extension(slot, tokens[start:stop], parents[start:stop], first)])
        assert logits.shape == (stop - start - first, V)
        assert logits.dtype == np.float32
        got += [np.empty(0, np.float32)] * first + list(logits)
    for logits, path in zip(got, held_paths(tokens, parents), strict=True):
        if len(logits):
            assert np.array_equal(logits, TableModel(seed, V, order).logits_after(path))
    assert model.num_forward_tokens == len(tokens) + 3


@given(tree=trees(), data=st.data())
def test_keep_leaves_each_kept_row_its_path(tree, data) -> None:
    tokens, parents = tree
    model = TableModel(1, V, order=14)
    slot = model.open()
    model.forward([Extension(slot, tokens, parents)])
    num_prefix = data.draw(st.integers(0, len(tokens)))
    kept = set(range(num_prefix))
    for row in range(num_prefix, len(tokens)):
        if (parents[row] in kept or parents[row] == NO_PARENT) and data.draw(st.booleans()):
            kept.add(row)
    order = sorted(kept)
    model.keep(slot, num_prefix, order[num_prefix:])
    assert model.num_rows(slot) == len(order)
    paths = held_paths(tokens, parents)
    for new_row, old_row in enumerate(order):
        (logits,) = model.forward([Extension(slot, [5], [new_row])])
        assert np.array_equal(logits[0], model.logits_after([*paths[old_row], 5]))
        model.keep(slot, len(order))


def test_a_sequence_is_separate_from_the_others_and_gone_after_close() -> None:
    model = TableModel(3, V)
    first, second = model.open(), model.open()
    a, b = model.forward([chain(first, [1, 2]), chain(second, [4])])
    assert np.array_equal(a[1], model.logits_after([1, 2]))
    assert np.array_equal(b[0], model.logits_after([4]))
    assert model.num_forward_passes == 1
    model.close(first)
    assert model.num_rows(second) == 1
    with pytest.raises(ModelError, match=r"slot 0 is not open; open slots: \[1\]"):
        model.num_rows(first)
    assert model.open() not in (first, second)


def test_returned_logits_can_be_written_to_without_changing_the_model() -> None:
    model = TableModel(3, V)
    slot = model.open()
    (logits,) = model.forward([chain(slot, [1])])
    expected = logits.copy()
    logits.fill(0)
    assert np.array_equal(model.logits_after([1]), expected[0])


@pytest.mark.parametrize(
    ("extension", "error", "text"),
    [
        (Extension(9, [1], [-1]), ModelError, "slot 9 is not open"),
        (Extension(0, [V], [0]), ModelError, "token ids must be 0 to 7, got 8"),
        (Extension(0, [-1], [0]), ModelError, "token ids must be 0 to 7, got -1"),
        (Extension(0, [1], [2]), ModelError, "the parent of row 2 must be -1 or an earlier row, got 2"),
        (Extension(0, [1], [-2]), ModelError, "the parent of row 2"),
        (Extension(0, [1, 2], [1]), ModelError, "2 token_ids need as many parents, got 1"),
        (Extension(0, [1], [1], 2), ModelError, "first_logits_idx must be 0 to 1, got 2"),
        (Extension(0, [1] * 4, [0, 0, 0, 0]), CapacityError, r"more than the sequence has room for \(5\)"),
        (Extension(0, [1, 1], [1, 2]), CapacityError, "position 3 is not below max_model_len"),
    ],
)
def test_a_broken_extension_raises_and_changes_nothing(extension: Extension, error: type[Exception], text: str) -> None:
    model = TableModel(0, V, max_model_len=3, num_tree_rows=2)
    slot, second = model.open(), model.open()
    model.forward([chain(slot, [1, 2])])
    with pytest.raises(error, match=text):
        model.forward([chain(second, [1]), extension])
    assert (model.num_rows(slot), model.num_rows(second)) == (2, 0)
    assert (model.num_forward_passes, model.num_forward_tokens) == (1, 2)


@pytest.mark.parametrize(
    ("num_prefix", "rows"), [(5, ()), (-1, ()), (1, (0,)), (0, (2, 1)), (1, (3,)), (1, (2,)), (0, (1,))]
)
def test_a_broken_keep_raises_and_changes_nothing(num_prefix: int, rows: tuple[int, ...]) -> None:
    model = TableModel(0, V)
    slot = model.open()
    model.forward([Extension(slot, [1, 2, 3, 4], [-1, 0, 1, 2])])
    with pytest.raises(ModelError):
        model.keep(slot, num_prefix, rows)
    assert model.num_rows(slot) == 4


def test_two_extensions_of_one_slot_and_more_slots_than_allowed_raise() -> None:
    model = TableModel(0, V, max_slots=1)
    slot = model.open()
    with pytest.raises(CapacityError, match="all 1 slots are open"):
        model.open()
    with pytest.raises(ModelError, match="one extension per slot"):
        model.forward([chain(slot, [1]), chain(slot, [2], first_row=1)])
    model.close(slot)
    model.open()


def test_a_sequence_has_the_room_that_it_asked_for() -> None:
    model = TableModel(0, V, max_model_len=20, num_tree_rows=5, row_bytes=12)
    whole, small = model.open(), model.open(3)
    assert (model.row_bytes, model.capacity(whole), model.capacity(small), model.num_open) == (12, 25, 3, 2)
    model.forward([chain(small, [1, 2, 3])])
    model.keep(small, 2)
    with pytest.raises(CapacityError, match=r"2 rows and 2 new ones are more than the sequence has room for \(3\)"):
        model.forward([chain(small, [1, 2], first_row=2)])
    for wrong in (0, 26):
        with pytest.raises(CapacityError, match=f"1 to 25 rows, got {wrong}"):
            model.open(wrong)
    with pytest.raises(SettingsError, match="row_bytes"):
        TableModel(0, V, row_bytes=0)
    assert model.blend(TableModel(1, V), 0.5).row_bytes == 12


def test_copied_rows_give_the_logits_of_their_text_and_are_separate_from_their_source() -> None:
    model = TableModel(0, V, order=10)
    source, slot = model.open(), model.open(6)
    model.forward([chain(source, [1, 2, 3, 4])])
    model.copy_rows(source, slot, 3)
    model.keep(source, 1)
    (logits,) = model.forward([chain(slot, [5], first_row=3)])
    assert np.array_equal(logits[0], model.logits_after([1, 2, 3, 5]))
    assert (model.num_rows(source), model.num_rows(slot), model.capacity(slot)) == (1, 4, 6)


@pytest.mark.parametrize(
    ("to_full", "num_rows", "error", "text"),
    [
        (True, 1, ModelError, "slot 1 holds 1 rows"),
        (False, 3, ModelError, "first 3 of 4 rows of slot 0"),  # the third is a sibling of the second
        (False, 5, ModelError, "first 5 of 4 rows"),
        (False, -1, ModelError, "first -1 of 4 rows"),
        (False, 2, CapacityError, "2 rows are more than slot 2 has room for"),
    ],
)
def test_a_broken_copy_raises_and_changes_nothing(
    to_full: bool, num_rows: int, error: type[Exception], text: str
) -> None:
    model = TableModel(0, V)
    source, full, small = model.open(), model.open(), model.open(1)
    model.forward([Extension(source, [1, 2, 3, 4], [-1, 0, 0, 2]), chain(full, [1])])
    with pytest.raises(error, match=text):
        model.copy_rows(source, full if to_full else small, num_rows)
    assert [model.num_rows(slot) for slot in (source, full, small)] == [4, 1, 0]


def test_a_known_context_has_the_logits_it_always_had() -> None:
    known = np.array([4.1726804, 2.2749853, 2.0262773, -1.3013647, -1.1122180, 2.4977942])  # in any process
    np.testing.assert_allclose(TableModel(7, 6).logits_after([1, 2]), known, rtol=1e-5)


def test_seeds_and_contexts_give_different_logits() -> None:
    seen = {
        tuple(TableModel(seed, V).logits_after([a, b]).tolist())
        for seed in (0, 1, 2)
        for a in range(V)
        for b in range(V)
    }
    assert len(seen) == 3 * V * V


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
def test_a_blend_has_the_others_first_choice_at_the_rate_asked_for(agreement: float) -> None:
    target = TableModel(1, 32)
    draft = TableModel(2, 32).blend(target, agreement)
    contexts = [[a, b] for a in range(32) for b in range(32)]
    agrees = [int(target.logits_after(c).argmax() == draft.logits_after(c).argmax()) for c in contexts]
    rate = sum(agrees) / len(agrees)
    if agreement in (0.0, 1.0):
        assert rate == agreement
    else:
        assert abs(rate - agreement) < 0.06  # four standard deviations
    if agreement == 1.0:
        assert all(np.array_equal(target.logits_after(c), draft.logits_after(c)) for c in contexts)


def test_a_blend_of_models_of_different_order_sees_what_each_of_them_sees() -> None:
    target = TableModel(1, V, order=3)
    draft = TableModel(2, V, order=1).blend(target, 1.0)
    assert np.array_equal(draft.logits_after([3, 4, 5, 6]), target.logits_after([4, 5, 6]))
    opposing = TableModel(2, V, order=1).blend(target, 0.0)
    assert opposing.logits_after([3, 4, 5]).argmin() == target.logits_after([3, 4, 5]).argmax()


def test_models_that_cannot_be_made_raise() -> None:
    with pytest.raises(SettingsError, match="order must be 1 or more, got 0"):
        TableModel(0, V, order=0)
    with pytest.raises(VocabularyError, match="4 and 8 tokens"):
        TableModel(0, 4).blend(TableModel(0, 8), 0.5)
    with pytest.raises(SettingsError, match=r"agreement must be 0 to 1.*got 1\.5"):
        TableModel(0, 4).blend(TableModel(1, 4), 1.5)
    with pytest.raises(SettingsError, match="agreement"):
        TableModel(0, 1).blend(TableModel(1, 1), 0.5)
