"""A sink is one more score of a head: it takes a share of the weights and gives no value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.mistral import modeling_mistral

from card.kernels.int8_linear import why_not_int8
from card.kernels.jit.tables import LayerTable
from card.kernels.machine_code import machine_code
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests import tiny
from tests.reaching_in import layer_tables_of

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TEXT = [3 + i * i % 40 for i in range(30)]
HEADS, LAYERS = 4, 2
TREE = (0, 0, 1, 2, 2)  # rows behind the text, counted from its last one
weigh: Any = machine_code("attention").weigh if REASON is None else None


def weigh_here(scores: int, seen: int, sink: int) -> None:
    weigh(scores, seen, sink)


def weights_of(scores: np.ndarray, sink: np.ndarray | None) -> np.ndarray:
    """Return the weights of some scores, as machine code computes them."""
    room = np.concatenate([scores, np.full(32, 9.0)]).astype(np.float32)
    machine_code("vectors").entered(weigh_here)(room.ctypes.data, len(scores), 0 if sink is None else sink.ctypes.data)
    return room[: len(scores)]


@pytest.mark.parametrize("sink", [-60.0, -1.0, 0.5, 30.0])
@pytest.mark.parametrize("seen", [1, 15, 16, 50])
def test_weights_are_those_of_a_softmax_with_one_more_score(sink: float, seen: int) -> None:
    scores = np.random.default_rng(seen).standard_normal(seen) * 3
    beside = np.exp(np.append(scores, sink) - max(scores.max(), sink))
    np.testing.assert_allclose(
        weights_of(scores, np.array([sink], np.float32)), beside[:-1] / beside.sum(), rtol=2e-6, atol=1e-37
    )


def test_a_sink_that_weighs_nothing_changes_no_bit() -> None:
    scores = np.random.default_rng(0).standard_normal(40)
    assert np.array_equal(weights_of(scores, np.array([-80.0], np.float32)), weights_of(scores, None))


@pytest.fixture(scope="module")
def model() -> MistralForCausalLM:
    torch.manual_seed(0)
    sizes = {**tiny.SIZES, "num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    config = MistralConfig(**sizes, vocab_size=64, sliding_window=9, attn_implementation="eager")
    return MistralForCausalLM(config).eval()


def runner_with(model: MistralForCausalLM, sinks: np.ndarray) -> Any:
    """Return an exact runner whose layers have sinks [layers, heads]."""
    runner = plain_runner(model, max_model_len=64, max_tree_rows=32)
    layer_tables_of(runner)[:, LayerTable.sinks] = [row.ctypes.data for row in sinks]
    return runner


def test_logits_are_those_of_transformers(model, monkeypatch) -> None:
    sinks = np.random.default_rng(1).standard_normal((LAYERS, HEADS)).astype(np.float32)
    runner = runner_with(model, sinks)
    [logits] = runner.forward([Extension(runner.open(), TEXT, range(-1, len(TEXT) - 1))])
    monkeypatch.setattr(modeling_mistral, "eager_attention_forward", eager_attention_forward)
    for layer, its in zip(model.model.layers, sinks, strict=True):
        layer.self_attn.sinks = torch.from_numpy(its)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
    runner = plain_runner(model, max_model_len=64)
    [without] = runner.forward([Extension(runner.open(), TEXT, range(-1, len(TEXT) - 1))])
    assert np.abs(without - expected).max() > 1e-2, "the sinks matter"


def test_rows_of_a_tree_have_the_bits_of_their_own_text(model) -> None:
    sinks = np.random.default_rng(2).standard_normal((LAYERS, HEADS)).astype(np.float32)
    runner, last = runner_with(model, sinks), len(TEXT) - 1
    whole = runner.open()
    runner.forward([Extension(whole, TEXT, range(-1, last))])
    ids = [5, 6, 7, 8, 9]
    [tree] = runner.forward([Extension(whole, ids, [last + parent for parent in TREE])])
    for path in ([5, 7], [6, 9]):
        alone = runner.open()
        for i, token_id in enumerate([*TEXT, *path]):
            [row] = runner.forward([Extension(alone, [token_id], [i - 1])])
            if i >= len(TEXT):
                assert np.array_equal(row[0], tree[ids.index(token_id)])
