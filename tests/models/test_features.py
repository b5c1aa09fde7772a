"""Features are transformers' own hidden states, of the rows that were wished for, and cost nothing without a wish."""

from __future__ import annotations

import copy
import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.features import RAW, FeatureWish, PassStates, Rows
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.hidden_states import (
    CHAIN,
    HIDDEN,
    KINDS,
    MAX_MODEL_LEN,
    NUM_LAYERS,
    VOCAB_SIZE,
    assert_same,
    chain,
    make_model,
    make_runner,
    own_states,
)
from tests.reaching_in import decoder_of
from tests.sources import PACKAGE
from tests.static import operations_of

REASON = why_not_int8()
INT8 = pytest.param(
    "int8", marks=pytest.mark.skipif(REASON is not None and "not exact" not in REASON, reason=str(REASON))
)
WAYS = ("own pass", "generic", "bucketed", INT8)
LAST = FeatureWish((-1,), "logits")
WISHES = (
    FeatureWish((-1,), "all"),
    FeatureWish((0, 2, NUM_LAYERS), "all"),
    FeatureWish((-4, -3, -2, -1), "logits"),
    FeatureWish((3, 1), "last"),
)


def assert_delivered(kind: str, delivered: Floats, expected: Tensor) -> None:
    """Fail unless the features are those expected, nearly so in integers."""
    got = torch.from_numpy(delivered)
    if kind != "int8":
        assert_same(got, expected)
        return
    assert got.shape == expected.shape
    assert (got - expected).norm() < 0.1 * expected.norm() or not len(got)


@pytest.mark.parametrize("kind", [*KINDS, INT8])
@pytest.mark.parametrize("wish", WISHES)
def test_features_are_the_hidden_states_of_transformers(kind: str, wish: FeatureWish) -> None:
    runner = make_runner(kind)
    runner.features.wish([wish])
    slot = runner.open()
    expected = own_states(CHAIN, wish.layers)
    for start, end in ((0, 5), (5, 6), (6, 12)):  # a prompt in chunks
        runner.forward([chain(slot, CHAIN[start:end], start)])
        assert runner.features.of(0, wish).shape == (end - start, len(wish.layers) * HIDDEN)
        assert_delivered(kind, runner.features.of(0, wish), expected[start:end])


@pytest.mark.parametrize("rows", ["all", "logits"])
def test_the_last_state_is_given_without_its_norm_too_and_outlives_the_next_pass(rows: Rows) -> None:
    runner, both = make_runner("own pass"), FeatureWish((RAW, -1), rows)
    runner.features.wish([both])
    slot, model = runner.open(), make_model()
    runner.forward([chain(slot, CHAIN, first=3)])
    found = torch.from_numpy(runner.features.of(0, both))
    runner.forward([chain(slot, CHAIN[:2], start=len(CHAIN))])
    with torch.no_grad():
        raw, final = found.clone().split(HIDDEN, -1)
        assert_same(model.model.norm(raw), final)
        assert not torch.allclose(raw, final, atol=1e-2)
        assert_same(final, own_states(CHAIN, (-1,), model)[0 if rows == "all" else 3 :])


@pytest.mark.parametrize("kind", ["generic", "bucketed"])
def test_a_model_without_our_own_pass_refuses_a_wish_for_the_state_before_its_last_norm(kind: str) -> None:
    runner = make_runner(kind)
    with pytest.raises(ModelError, match="no state before its final norm; run it on a CPU in our own pass"):
        runner.features.wish([FeatureWish((RAW,), "all")])


@pytest.mark.parametrize("kind", [*KINDS, INT8])
@pytest.mark.parametrize("wishes", [WISHES, WISHES[2:]])
def test_each_of_several_consumers_gets_its_rows_of_each_text_of_a_batch(kind: str, wishes: list[FeatureWish]) -> None:
    runner = make_runner(kind)
    runner.features.wish(wishes)
    slots = [runner.open() for _ in range(3)]
    texts = [CHAIN, CHAIN[3:9], CHAIN[::-1]]
    firsts = [4, 6, 11]  # the second extension asks for no logits
    extensions = [chain(slot, ids, first=first) for slot, ids, first in zip(slots, texts, firsts, strict=True)]
    for batch in (extensions, [replace(extensions[0], slot=runner.open())]):
        runner.forward(batch)
        for wish in wishes:
            for i, (ids, first) in enumerate(zip(texts[: len(batch)], firsts, strict=False)):
                expected = own_states(ids, wish.layers)[0 if wish.rows == "all" else first :]
                assert_delivered(kind, runner.features.of(i, wish), expected)
    runner.forward([chain(runner.open(), CHAIN, first=len(CHAIN))])
    for wish in wishes:
        assert len(runner.features.of(0, wish)) == (len(CHAIN) if wish.rows == "all" else 0)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("wish", WISHES)
def test_features_of_a_tree_are_those_of_each_path(kind: str, wish: FeatureWish) -> None:
    runner = make_runner(kind)
    runner.features.wish([wish])
    slot = runner.open()
    runner.forward([chain(slot, CHAIN[:4])])
    runner.forward([Extension(slot, [20, 21, 22], [3, 3, 4])])
    for row, path in enumerate(([20], [21], [20, 22])):
        expected = own_states([*CHAIN[:4], *path], wish.layers)[-1:]
        assert_delivered(kind, runner.features.of(0, wish)[row : row + 1], expected)


@pytest.mark.parametrize("kind", WAYS)
def test_rows_behind_a_reused_prefix_have_the_features_of_the_whole_text(kind: str) -> None:
    runner = make_runner(kind)
    wish = WISHES[1]
    runner.features.wish([wish])
    source, slot = runner.open(), runner.open()
    runner.forward([chain(source, CHAIN[:7])])
    runner.copy_rows(source, slot, 5)
    runner.forward([chain(slot, CHAIN[5:], 5)])
    assert_delivered(kind, runner.features.of(0, wish), own_states(CHAIN, wish.layers)[5:])


def test_a_model_of_another_architecture_gives_its_own_states() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=24, n_layer=3, n_head=2, n_positions=MAX_MODEL_LEN)
    model = GPT2LMHeadModel(config).train(False)
    wish = FeatureWish((0, 2, -1))
    expected = own_states(CHAIN, wish.layers, model)
    runner = plain_runner(copy.deepcopy(model), max_model_len=MAX_MODEL_LEN)
    assert not runner.has_own_pass
    runner.features.wish([wish])
    runner.forward([chain(runner.open(), CHAIN)])
    assert_same(runner.features.of(0, wish), expected)


# ---- nobody asks, nobody pays ---------------------------------------------------------------------------------------


def one_pass(runner: RowRunner) -> Callable[[], list[Floats]]:
    """Return what runs a prompt, a tree below it and a batch, each time anew."""

    def run() -> list[Floats]:
        slots = [runner.open() for _ in range(2)]
        (prompt,) = runner.forward([chain(slots[0], CHAIN, first=len(CHAIN) - 1)])
        (tree,) = runner.forward([Extension(slots[0], [20, 21, 22], [11, 11, 12])])
        both = runner.forward([chain(slots[1], CHAIN[:3]), chain(slots[0], [4], start=15)])
        for slot in slots:
            runner.close(slot)
        return [prompt, tree, *both]

    return run


def work_of(run: Callable[[], object]) -> list[object]:
    """Return the operations of torch, and the functions of this package, of one call of ``run`` in order."""
    called: list[object] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            called.append(frame.f_code.co_qualname)

    operations = operations_of(run)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [*operations, *called]


def test_functions_that_merely_lie_below_a_folder_of_the_packages_name_are_not_counted() -> None:
    names: dict[str, Callable[[], object]] = {}
    exec(compile("def work(): ...", "/a clone/card/.venv/lib/other.py", "exec"), names)
    assert work_of(names["work"]) == []


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def num_held() -> int:
    """Return how many tensors and arrays there are; tracemalloc must be running."""
    gc.collect()
    arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    return len(arrays.traces) + sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("kind", WAYS)
def test_without_a_wish_a_pass_does_no_operation_more_and_keeps_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(kind)
    run = one_pass(runner)
    run()
    with monkeypatch.context() as patch:  # whatever serves features is not even touched
        for name in ("__init__", "take", "take_final"):
            patch.setattr(PassStates, name, None)
        plain, held = work_of(run), num_held()
    modules = list(decoder_of(runner).model.modules()) if kind == "generic" else []
    assert not [module for module in modules if module._forward_hooks or module._forward_pre_hooks]
    runner.features.wish([WISHES[1]])
    run()
    assert len(work_of(run)) > len(plain)
    assert num_held() > held, "the last pass is held"
    runner.features.wish([])
    run()
    assert work_of(run) == plain
    assert num_held() == held


def test_without_a_wish_transformers_is_not_asked_for_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("generic")
    model, asked = decoder_of(runner).model, []
    forward = model.forward

    def watched(**named: Any) -> Any:
        asked.append("output_hidden_states" in named)
        return forward(**named)

    monkeypatch.setattr(model, "forward", watched)
    run = one_pass(runner)
    run()
    runner.features.wish([LAST])
    run()
    assert asked == [False] * 3 + [True] * 3


@pytest.mark.parametrize("kind", WAYS)
def test_wishes_change_no_logits(kind: str) -> None:
    plain, keeping = make_runner(kind), make_runner(kind)
    keeping.features.wish(WISHES)
    for one, other in zip(one_pass(plain)(), one_pass(keeping)(), strict=True):
        assert np.array_equal(one, other)


# ---- when and for whom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WAYS)
def test_wishes_begin_and_change_at_any_time(kind: str) -> None:
    runner = make_runner(kind)
    slot = runner.open()
    runner.forward([chain(slot, CHAIN[:4])])
    for wish, start in ((LAST, 4), (WISHES[1], 6), (WISHES[3], 8)):
        runner.features.wish([wish])
        with pytest.raises(ModelError, match=r"kept features of 0 sequences.*ask for them before the pass"):
            runner.features.of(0, wish)
        runner.forward([chain(slot, CHAIN[start : start + 2], start)])
        assert_delivered(kind, runner.features.of(0, wish), own_states(CHAIN, wish.layers)[start : start + 2])


def test_what_nobody_wished_for_is_refused() -> None:
    runner = make_runner("own pass")
    runner.features.wish([LAST])
    runner.forward([chain(runner.open(), CHAIN)])
    for idx, wish in ((1, LAST), (-1, LAST), (0, WISHES[1])):
        with pytest.raises(ModelError, match=f"kept features of 1 sequences for 1 wishes, not those of sequence {idx}"):
            runner.features.of(idx, wish)


def test_features_of_a_failed_pass_are_not_those_of_the_one_before() -> None:
    runner = make_runner("own pass")
    runner.features.wish([LAST])
    runner.forward([chain(runner.open(), CHAIN)])
    with pytest.raises(ModelError, match="outside the model's vocabulary"):
        runner.forward([chain(runner.open(), [VOCAB_SIZE])])
    with pytest.raises(ModelError, match="kept features of 0 sequences"):
        runner.features.of(0, LAST)


@pytest.mark.parametrize("kind", ["own pass", "inflated"])
@pytest.mark.parametrize("layer", [-6, 5, 6])
def test_layers_that_the_original_lacks_are_refused_and_the_wishes_stay(kind: str, layer: int) -> None:
    runner = make_runner(kind)
    runner.features.wish([LAST])
    with pytest.raises(ModelError, match=f"are 0 to 4, or -1 to -5 from the last one, got {layer}; ask for others"):
        runner.features.wish([FeatureWish((0, layer))])
    runner.forward([chain(runner.open(), CHAIN)])
    assert_same(runner.features.of(0, LAST), own_states(CHAIN, LAST.layers, make_model()))


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_the_originals(kind: str) -> None:
    expected = make_model().get_input_embeddings().weight[[5, 3]].detach()
    assert np.array_equal(make_runner(kind).embeddings([5, 3]), expected)
