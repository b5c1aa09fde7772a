"""Layers of one model may differ in heads, their size, windows and the width of the MLP; equal ones cost no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from card.errors import ModelError
from card.kernels.jit.tables import CACHE_ROWS
from card.kernels.number_types import FLOAT32, Floats
from card.machine.threads import integer_passes_on
from card.models.architectures import Architecture, find_architecture
from card.models.architectures.architecture import sizes_of
from card.models.decoder_config import DecoderConfig
from card.models.files.generation_config import GenerationConfig
from card.models.layer_shape import LayerShape
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from card.models.own.plain_config import config_of
from card.models.own.reasons import is_exact
from card.models.parts import HEAD_NORMS, PRE_NORMS
from card.models.protocol import Extension
from card.models.rows.kv_cache import KVCache
from card.models.rows.kv_layout import KVLayout, KVShape
from card.models.runner import ExactRunner
from tests.reaching_in import buffer_bytes_of

HEADS, KV_HEADS, HEAD_SIZES, WIDTHS = [4, 6, 2, 6], [2, 3, 1, 3], [16, 24, 40, 24], [112, 64, 200, 80]
WINDOW = 9
VOCAB_SIZE, WIDTH = 96, 80
TEXT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(40)]
TREE = [([1, 2, 3, 4, 5], [-1, -1, 0, 2, 1])]  # token ids, and parents behind the text
EPS = 1e-6


ARCHITECTURE = Architecture(
    model_class="UnequalForCausalLM",
    model_type="unequal",
    norms={**PRE_NORMS, **HEAD_NORMS},
    has_windows=True,
)


def config() -> DecoderConfig:
    return ARCHITECTURE.make_config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=len(HEADS),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZES,
        intermediate_size=WIDTHS,
        max_position_embeddings=256,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )


def weights() -> dict[str, Floats]:
    random, made = np.random.default_rng(3), config()
    found = {"model.embed_tokens.weight": (VOCAB_SIZE, WIDTH), "model.norm.weight": (WIDTH,)}
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    for idx in range(made.num_hidden_layers):
        sizes = sizes_of(made, ARCHITECTURE.layer_shape(made, idx))
        for part in ARCHITECTURE.parts:
            found[f"model.layers.{idx}.{part.name}.weight"] = tuple(sizes[size] for size in part.shape)
    numbers = {name: random.standard_normal(shape).astype(np.float32) for name, shape in found.items()}
    return {name: 1 + one / 9 if one.ndim == 1 else one * np.float32(0.2) for name, one in numbers.items()}


def make_runner(*, in_integers: bool = False) -> ExactRunner:
    model = DecoderModel(ARCHITECTURE, config(), GenerationConfig(), weights())
    model.computes_int8 = in_integers
    if not is_exact(model):
        pytest.skip("no exact passes here")
    return ExactRunner(model, max_model_len=128, max_tree_rows=32)


@pytest.fixture(scope="module", params=["float32", "int8"])
def runner(request: pytest.FixtureRequest) -> ExactRunner:
    return make_runner(in_integers=request.param == "int8")


def normed(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * weight


def turned(x: Floats) -> Floats:
    """Turn heads [T, H, D] by their positions."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] / 10000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), -1)


def attended(x: Floats, its: dict[str, Floats], shape: LayerShape, window: int | None) -> Floats:
    size, group = shape.head_size, shape.num_heads // shape.num_kv_heads
    query, key, value = ((x @ its[f"self_attn.{one}_proj"].T).reshape(len(x), -1, size) for one in "qkv")
    query = turned(normed(query, its["self_attn.q_norm"]))
    key, value = (np.repeat(one, group, 1) for one in (turned(normed(key, its["self_attn.k_norm"])), value))
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(size)
    ages = np.arange(len(x))[:, None] - np.arange(len(x))
    scores[:, (ages < 0) | (ages >= (window or len(x)))] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), value)
    return mixed.reshape(len(x), -1) @ its["self_attn.o_proj"].T


def reference(token_ids: Sequence[int]) -> Floats:
    """Return the logits of a text [T, V] by the plainest code."""
    of, made = {name: one.astype(np.float64) for name, one in weights().items()}, config()
    hidden: Any = of["model.embed_tokens.weight"][list(token_ids)]
    for idx, kind in enumerate(made.layer_types or ()):
        begin = f"model.layers.{idx}."
        its = {name[len(begin) : -len(".weight")]: one for name, one in of.items() if name.startswith(begin)}
        window = WINDOW if kind == "sliding_attention" else None
        x = normed(hidden, its["input_layernorm"])
        hidden = hidden + attended(x, its, ARCHITECTURE.layer_shape(made, idx), window)
        x = normed(hidden, its["post_attention_layernorm"])
        gate, up = (x @ its[f"mlp.{one}_proj"].T for one in ("gate", "up"))
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ its["mlp.down_proj"].T
    logits: Floats = normed(hidden, of["model.norm.weight"]) @ of["lm_head.weight"].T
    return logits


def logits_of(runner: ExactRunner, token_ids: Sequence[int]) -> Floats:
    slot = runner.open()
    (logits,) = runner.forward([Extension.of_text(slot, token_ids, first_logits=0)])
    runner.close(slot)
    return np.array(logits)


def test_a_model_of_unequal_layers_computes_what_plain_code_does() -> None:
    found, expected = logits_of(make_runner(), TEXT), reference(TEXT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    in_integers = logits_of(make_runner(in_integers=True), TEXT)
    assert np.linalg.norm(in_integers - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_its_rows_depend_on_their_own_text_alone(runner: ExactRunner, num_threads: int) -> None:
    expected = logits_of(runner, TEXT)
    with integer_passes_on(num_threads):
        slot, other = runner.open(), runner.open(50)
        (first, _) = runner.forward([Extension.of_text(slot, TEXT[:7], first_logits=0), Extension.of_text(other, [5])])
        (second,) = runner.forward([Extension.of_text(slot, TEXT, 7, first_logits=7)])
        assert np.array_equal(np.concatenate((first, second)), expected)
        last, (token_ids, parents) = len(TEXT) - 1, TREE[0]
        (found,) = runner.forward([Extension(slot, token_ids, [last + 1 + one for one in parents])])
        for idx in range(len(token_ids)):
            path, node = list[int](), idx
            while node >= 0:
                path, node = [token_ids[node], *path], parents[node]
            assert np.array_equal(found[idx], logits_of(runner, [*TEXT, *path])[-1])
        runner.close(slot)
        runner.close(other)


def test_its_rows_are_kept_copied_taken_out_and_put_back(runner: ExactRunner) -> None:
    slot, last, (token_ids, parents) = runner.open(), len(TEXT) - 1, TREE[0]
    runner.forward([Extension.of_text(slot, TEXT)])
    runner.forward([Extension(slot, token_ids, [last + 1 + one for one in parents])])
    runner.keep(slot, len(TEXT), [last + 1, last + 3, last + 4])
    text = [*TEXT, 1, 3, 4]
    expected = logits_of(runner, [*text, 9])[-1:]
    copy, stored = runner.open(len(text) + 3), runner.open(len(text) + 1)
    runner.copy_rows(slot, copy, len(text))
    runner.write_rows(stored, runner.read_rows(slot))
    for one in (slot, copy, stored):
        (found,) = runner.forward([Extension.of_text(one, [*text, 9], len(text))])
        assert np.array_equal(found, expected)
        runner.close(one)


def test_a_config_may_state_a_size_for_each_layer() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "num_key_value_heads": 2}
    lists = {"num_attention_heads": [4, 2], "intermediate_size": [48, 80]}
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32", **sizes, **lists}
    found = config_of(raw)
    entry = find_architecture("llama")
    assert found is not None and entry is not None
    assert [entry.layer_shape(found, idx) for idx in range(2)] == [LayerShape(4, 2, 16, 48), LayerShape(2, 2, 32, 80)]
    for wrong in ([4], [4, 2, 2], [4, 3], [4, 0], [4, "2"], [4, None]):
        assert config_of({**raw, "num_attention_heads": wrong}) is None


def test_a_row_takes_what_its_layers_keep_and_no_more() -> None:
    runner = make_runner()
    padded = [-(-size // 16) * 16 for size in HEAD_SIZES]
    assert runner.row_bytes == sum(2 * 4 * heads * size for heads, size in zip(KV_HEADS, padded, strict=True))
    seen = [30, WINDOW, 30, WINDOW]
    read = sum(2 * 4 * n * heads * size for n, heads, size in zip(seen, KV_HEADS, padded, strict=True))
    assert runner.bytes_read(30, None) == read


def test_scores_of_rows_are_refused_where_heads_differ() -> None:
    runner = make_runner()
    slot = runner.open()
    runner.forward([Extension.of_text(slot, TEXT)])
    with pytest.raises(ModelError, match="heads differ in number or size"):
        runner.forward([Extension(slot, [1], [len(TEXT) - 1], scores="weights")])
    assert runner.num_rows(slot) == len(TEXT)


def test_layers_of_one_shape_lie_in_one_array_and_others_behind_each_other() -> None:
    alike, other = KVShape(3, 16), KVShape(1, 32)
    for layers, shapes in (
        ((alike,) * 3, [(3, 2, 3, CACHE_ROWS, 16)]),
        (
            (alike, alike, other, alike),
            [(2, 2, 3, CACHE_ROWS, 16), (1, 2, 1, CACHE_ROWS, 32), (1, 2, 3, CACHE_ROWS, 16)],
        ),
    ):
        cache = KVCache(KVLayout(layers, FLOAT32), 5)
        slot = cache.open()
        cache[slot].tree.append([-1])
        cache.make_room(slot, 0)
        runs = cache[slot].blocks[0].runs
        assert [run.shape for run in runs] == shapes
        assert (
            cache.row_bytes
            == sum(run.nbytes for run in runs) // CACHE_ROWS
            == 4 * sum(one.num_elements for one in layers)
        )
        ends = [run.ctypes.data + run.nbytes for run in runs]
        assert [run.ctypes.data for run in runs[1:]] == ends[:-1]


def test_a_model_of_equal_layers_takes_the_memory_that_it_took() -> None:
    model: Any = load_decoder("demo-target", dtype="bfloat16")
    if not is_exact(model):
        pytest.skip("no exact passes here")
    runner = ExactRunner(model, max_model_len=64)
    of = model.config
    assert runner.row_bytes == of.num_hidden_layers * 2 * of.num_key_value_heads * of.head_dim * 2
    with integer_passes_on(1):
        logits_of(runner, TEXT[:16])
    found = buffer_bytes_of(runner)
    heads, groups = of.num_attention_heads + 2 * of.num_key_value_heads, -(-of.intermediate_size // 64)
    assert found["projected"] == 16 * 4 * heads * of.head_dim
    assert found["attended"] == 16 * 4 * of.num_attention_heads * of.head_dim
    assert found["gated"] == 16 * 64 * groups
