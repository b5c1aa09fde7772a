"""RowRunner against transformers' own forward passes, on tiny random models in float32."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from card.backends.cuda.bucketed import BucketedRunner
from card.backends.transformers.runner import TorchRunner
from card.errors import CapacityError, ModelError
from card.models.protocol import NO_PARENT, Extension
from card.models.rows.row_tree import Chunk, RowTree, Window
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.examples import settings
from tests.reaching_in import cache_of, kv_of, num_ancestors
from tests.static import tensor_of
from tests.tiny import NO_ENDS, tiny

VOCAB_SIZE = 61
MAX_MODEL_LEN = 40
MAX_TREE_ROWS = 24
SIZES = tiny(
    VOCAB_SIZE,
    num_hidden_layers=3,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.4,  # large, so that a wrong mask or position shows in the logits
    **NO_ENDS,
)
FACTORS: dict[str, Any] = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
CAPPED: dict[str, Any] = {"sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
GEMMA4: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_global_key_value_heads": 1,
    "global_head_dim": 16,
}
LLAMA4: dict[str, Any] = {"num_local_experts": 4, "moe_layers": [1], "intermediate_size_mlp": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias-mha": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-rope3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "granite": ("Granite", FACTORS),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 5}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", CAPPED),
    "gemma3": ("Gemma3", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "gemma4": ("Gemma4", GEMMA4),  # full layers have fewer KV heads, of another size
    "gpt-oss": ("GptOss", {**EXPERTS, "num_local_experts": 4, "sliding_window": 5}),  # sinks
    "granite-swa": ("GraniteSWA", {"sliding_window": 5}),
    "deepseek2": ("DeepseekV2", MLA),  # values of another size than keys
    "deepseek3": ("DeepseekV3", {**MLA, "n_group": 1, "topk_group": 1}),
    "minicpm3": ("MiniCPM3", {**MLA, "q_lora_rank": 12}),
    "llama4": ("Llama4", {"attention_chunk_size": 5, "floor_scale": 4, "no_rope_layers": [1, 1, 0], **LLAMA4}),
    "mimo": ("MiMoV2Flash", {"v_head_dim": 6}),
}
FAMILIES = ("Gemma2", "Gemma3", "Granite", "Llama", "Mistral", "Qwen2", "Qwen3")
FUSABLE = [name for name, (family, _) in MODELS.items() if family in FAMILIES]
WAYS = ("modules", "own pass", "walked by torch")  # the last one is that of a GPU
CASES = [(name, "modules") for name in MODELS] + [(name, way) for name in FUSABLE for way in WAYS[1:]]
FEW = [*(("llama", way) for way in WAYS), *(("qwen2-sliding", way) for way in WAYS[1:]), ("gemma2", "modules")]
quick = settings(deadline=None, max_examples=6)


@functools.cache
def make_model(name: str) -> PreTrainedModel:
    family, changes = MODELS[name]
    config_name = f"{family}TextConfig" if family in ("Gemma3", "Gemma4", "Llama4") else f"{family}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if family != "Gemma" else 0.0, 0.2)  # norm weights and biases that matter
    return model.eval()


def runner_of(model: PreTrainedModel, way: str, **settings: Any) -> RowRunner:
    sizes = {"max_model_len": 16, "max_tree_rows": 0, **settings}
    if way == "walked by torch":
        return BucketedRunner(model, **sizes, own_pass=True)
    return plain_runner(model, **sizes, own_pass=way != "modules")


@functools.cache
def make_runner(name: str, way: str) -> RowRunner:
    model = copy.deepcopy(make_model(name))
    return runner_of(model, way, max_model_len=MAX_MODEL_LEN, max_tree_rows=MAX_TREE_ROWS)


def own_logits(name: str, ids: Sequence[int]) -> Tensor:
    """Logits of the last token by transformers' own code, without a cache."""
    with torch.no_grad():
        logits: Tensor = make_model(name)(torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
    return logits


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    while row != NO_PARENT:
        path.append(row)
        row = parents[row]
    return path[::-1]


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(tensor_of(got), tensor_of(expected), atol=2e-4, rtol=2e-4)


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 16) -> list[int]:
    """Parents of a random tree: a chain, then forks from anywhere, most often near the end."""
    num_chained = draw(st.integers(1, 9))
    parents = list(range(-1, num_chained - 1))
    for row in range(num_chained, draw(st.integers(num_chained, max_rows))):
        parents.append(draw(st.integers(max(0, row - 5), row - 1) | st.integers(0, row - 1)))
    return parents


def tokens_of(parents: Sequence[int], seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, len(parents)).tolist()


def is_visible(tree: RowTree, start: int) -> np.ndarray:
    bias = tree.bias(start)
    assert bias is not None
    return bias[:, : tree.num_rows] == 0


@pytest.mark.parametrize(("name", "way"), CASES)
@quick
@given(parents=trees(), seed=st.integers(0, 99), cuts=st.sets(st.integers(1, 15), max_size=3))
def test_every_node_of_a_tree_gets_the_logits_of_its_path(
    name: str, way: str, parents: list[int], seed: int, cuts: set[int]
) -> None:
    runner, ids = make_runner(name, way), tokens_of(parents, seed)
    slot = runner.open()
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    parts = [runner.forward([Extension(slot, ids[a:b], parents[a:b])])[0] for a, b in itertools.pairwise(bounds)]
    expected = torch.stack([own_logits(name, [ids[i] for i in path_to(row, parents)]) for row in range(len(ids))])
    assert_same(np.concatenate(parts), expected)
    assert cache_of(runner)[slot].tree.positions().tolist() == [
        len(path_to(row, parents)) - 1 for row in range(len(ids))
    ]
    runner.close(slot)


@pytest.mark.parametrize(("name", "way"), FEW)
@quick
@given(many=st.lists(trees(), min_size=2, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_sequences_in_one_pass_get_what_each_gets_alone(
    name: str, way: str, many: list[list[int]], seed: int, data: st.DataObject
) -> None:
    runner = make_runner(name, way)
    texts = [tokens_of(parents, seed + i) for i, parents in enumerate(many)]
    firsts = [data.draw(st.integers(0, len(ids))) for ids in texts]
    alone = []
    for ids, parents, first in zip(texts, many, firsts, strict=True):
        slot = runner.open()
        alone.append(runner.forward([Extension(slot, ids, parents, first)])[0])
        runner.close(slot)
    slots = [runner.open() for _ in texts]
    together = runner.forward([Extension(*of) for of in zip(slots, texts, many, firsts, strict=True)])
    for got, expected in zip(together, alone, strict=True):
        assert got.shape == expected.shape
        assert_same(got, expected)
    for slot in slots:
        runner.close(slot)


@pytest.mark.parametrize(("name", "way"), FEW)
@quick
@given(parents=trees(), seed=st.integers(0, 99), data=st.data())
def test_kept_rows_equal_a_fresh_prefill_of_the_kept_text(
    name: str, way: str, parents: list[int], seed: int, data: st.DataObject
) -> None:
    runner, ids = make_runner(name, way), tokens_of(parents, seed)
    kept_path = path_to(data.draw(st.integers(0, len(ids) - 1)), parents)
    also = data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=3))
    kept = sorted({row for leaf in also for row in path_to(leaf, parents)} | set(kept_path))
    num_prefix = data.draw(st.integers(0, next((i for i, row in enumerate(kept) if row != i), len(kept))))
    slot = runner.open()
    runner.forward([Extension(slot, ids, parents)])
    runner.keep(slot, num_prefix, kept[num_prefix:])
    fresh = runner.open()
    new_parents = [kept.index(parents[row]) if parents[row] != NO_PARENT else NO_PARENT for row in kept]
    runner.forward([Extension(fresh, [ids[row] for row in kept], new_parents)])
    assert runner.num_rows(slot) == len(kept)
    assert cache_of(runner)[slot].tree.positions().tolist() == cache_of(runner)[fresh].tree.positions().tolist()
    kv, fresh_kv = (np.asarray(kv_of(runner, s, len(kept))) for s in (slot, fresh))
    np.testing.assert_allclose(kv, fresh_kv, atol=1e-4, rtol=1e-4)
    tip = kept.index(kept_path[-1])
    more = [Extension(s, [7, 8, 9], [tip, len(kept), tip]) for s in (slot, fresh)]
    got, expected = (runner.forward([extension])[0] for extension in more)
    assert_same(got, expected)
    text = [ids[row] for row in kept_path]
    assert_same(got, torch.stack([own_logits(name, text + end) for end in ([7], [7, 8], [9])]))
    runner.close(slot)
    runner.close(fresh)


@quick
@given(parents=trees(max_rows=30), cut=st.integers(0, 30))
def test_a_row_sees_itself_and_its_ancestors_and_nothing_else(parents: list[int], cut: int) -> None:
    tree = RowTree(64)
    cut = min(cut, len(parents) - 1)
    tree.append(np.asarray(parents[:cut], np.int64))
    tree.append(np.asarray(parents[cut:], np.int64))
    if len(parents) > 1:
        visible = is_visible(tree, 0)
        assert [np.flatnonzero(row).tolist() for row in visible] == [path_to(r, parents) for r in range(len(parents))]
        assert (visible.sum(1) == tree.positions() + 1).all()
    for start in range(len(parents)):
        assert tree.furthest(start) == tree.positions(start).max()
        paths = [path_to(row, parents) for row in range(start, len(parents))]
        windows: dict[Window, list[list[int]]] = {
            3: [path[-3:] for path in paths],
            Chunk(3): [path[(len(path) - 1) // 3 * 3 :] for path in paths],
        }
        for window, seen in windows.items():
            bias = tree.bias(start, window)
            if bias is not None:
                assert [np.flatnonzero(row[: len(parents)] == 0).tolist() for row in bias] == seen


def test_a_chain_needs_no_matrix_and_a_fork_one_of_the_forked_rows_only() -> None:
    tree = RowTree(5000)
    tree.append(np.arange(-1, 3999))
    tree.append(np.arange(3999, 4099))
    assert (tree.num_prefix_rows, num_ancestors(tree)) == (4100, 0)
    tree.append([20, 4100, 4099])
    assert num_ancestors(tree) <= 64 * 64
    assert is_visible(tree, 4100).sum(1).tolist() == [22, 23, 4101]
    tree.keep(4100, np.asarray([4102]))
    assert tree.num_prefix_rows == tree.num_rows == 4101


def test_a_truncation_copies_nothing_and_the_untouched_prefix_stays() -> None:
    runner = make_runner("llama", "own pass")
    slot = runner.open()
    runner.forward([Extension(slot, [1, 2, 3, 4, 5, 6], [-1, 0, 1, 2, 2, 4])])
    version = kv_of(runner, slot, 6)
    runner.keep(slot, 3)
    assert np.array_equal(kv_of(runner, slot, 6), version)
    runner.forward([Extension(slot, [4, 5, 6], [2, 2, 4])])
    before = kv_of(runner, slot, 6)
    runner.keep(slot, 3, [4, 5])
    kv = kv_of(runner, slot, 5)
    assert np.array_equal(kv[..., :3, :], before[..., :3, :])
    assert np.array_equal(kv[..., 3:5, :], before[..., 4:6, :])
    runner.close(slot)


def test_a_closed_slot_is_used_again_and_starts_empty() -> None:
    runner = plain_runner(make_model("llama"), max_model_len=16, max_tree_rows=4)
    slot = runner.open()
    first = runner.forward([Extension(slot, [1, 2, 3], [-1, 0, 1])])[0]
    memory = cache_of(runner)[slot].blocks[0].address
    runner.close(slot)
    with pytest.raises(ModelError, match="not open"):
        runner.num_rows(slot)
    again = runner.open()
    assert runner.num_rows(again) == 0
    assert np.array_equal(runner.forward([Extension(again, [1, 2, 3], [-1, 0, 1])])[0], first)
    assert cache_of(runner)[again].blocks[0].address == memory


@pytest.mark.parametrize(("name", "way"), FEW)
@quick
@given(parents=trees(), seed=st.integers(0, 99), num_prefix=st.integers(1, 9), num_free=st.integers(0, 5))
def test_rows_copied_into_a_smaller_sequence_continue_like_their_source(
    name: str, way: str, parents: list[int], seed: int, num_prefix: int, num_free: int
) -> None:
    runner, ids = make_runner(name, way), tokens_of(parents, seed)
    num_chained = next((row for row, parent in enumerate(parents) if parent != row - 1), len(parents))
    num_prefix = min(num_prefix, num_chained)
    source, slot = runner.open(len(ids)), runner.open(num_prefix + num_free)
    runner.forward([Extension(source, ids, parents)])
    runner.copy_rows(source, slot, num_prefix)
    assert (runner.capacity(source), runner.capacity(slot)) == (len(ids), num_prefix + num_free)
    assert (runner.num_rows(source), runner.num_rows(slot)) == (len(ids), num_prefix)
    new = Extension(slot, [3] * num_free, [num_prefix - 1] * num_free)
    if num_free:
        assert_same(runner.forward([new])[0][-1], own_logits(name, [*ids[:num_prefix], 3]))
    with pytest.raises(CapacityError, match=f"at most {num_prefix + num_free} fit"):
        runner.forward([Extension(slot, [3], [num_prefix - 1])])
    runner.close(slot)
    runner.close(source)


def test_the_memory_of_rows_is_reported_in_bytes() -> None:
    for dtype, num_bytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        runner = runner_of(copy.deepcopy(make_model("llama")).to(dtype), "modules", max_tree_rows=4)
        assert runner.row_bytes == 3 * 2 * 2 * 8 * num_bytes
        slot = runner.open(10)
        runner.open()
        assert cache_of(runner).num_bytes == 30 * runner.row_bytes
        runner.close(slot)
        assert cache_of(runner).num_bytes == 30 * runner.row_bytes  # kept for the next sequence


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_pass_changes_nothing(way: str) -> None:
    runner = runner_of(copy.deepcopy(make_model("llama")), way, max_model_len=8, max_tree_rows=2)
    one, two = runner.open(), runner.open()
    runner.forward([Extension(one, [1, 2, 3, 4, 5, 6], list(range(-1, 5))), Extension(two, [1, 2], [-1, 0])])
    good = Extension(two, [3, 4], [1, 1])
    refused: list[tuple[type[Exception], Extension]] = [
        (CapacityError, Extension(one, [1, 2, 3], [5, 6, 7])),  # position 8 of 8
        (CapacityError, Extension(one, [1, 2, 3, 4, 5], [5, 5, 5, 5, 5])),  # row 10 of 10
        (ModelError, Extension(one, [VOCAB_SIZE], [5])),
        (ModelError, Extension(one, [-1], [5])),
        (ModelError, Extension(one, [1, 2], [5, 7])),
        (ModelError, Extension(one, [1], [-2])),
        (ModelError, Extension(one, [1], [5, 6])),
        (ModelError, Extension(one, [], [])),
        (ModelError, Extension(one, [1], [5], 2)),
        (ModelError, good),
    ]
    for error, extension in refused:
        with pytest.raises(error):
            runner.forward([good, extension])
        assert (runner.num_rows(one), runner.num_rows(two)) == (6, 2)
    for keep in ((7, []), (2, [1, 3]), (2, [4, 3]), (2, [6]), (2, [4])):
        with pytest.raises(ModelError):
            runner.keep(one, *keep)
        assert runner.num_rows(one) == 6
    logits = runner.forward([good, Extension(one, [7, 8], [5, 6])])
    assert_same(logits[0], torch.stack([own_logits("llama", [1, 2, i]) for i in (3, 4)]))
    assert_same(logits[1][1], own_logits("llama", [1, 2, 3, 4, 5, 6, 7, 8]))


@pytest.mark.parametrize("max_packed_rows", [128, 8])
def test_a_long_prompt_runs_at_once_and_in_chunks(max_packed_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("card.backends.transformers.attention.MAX_PACKED_ROWS", max_packed_rows)
    for name, way in (*FEW, ("mistral-sliding", "own pass"), ("mistral-sliding", "walked by torch")):
        model = make_model(name)
        runner = runner_of(copy.deepcopy(model), way, max_model_len=64)
        ids = tokens_of(range(64), 3)
        with torch.no_grad():
            expected = model(torch.tensor([ids]), use_cache=False).logits[0]
        whole, chunked = runner.open(), runner.open()
        assert_same(runner.forward([Extension(whole, ids, list(range(-1, 63)))])[0], expected)
        runner.forward([Extension(chunked, ids[:20], list(range(-1, 19)), 20)])
        rest = runner.forward([Extension(chunked, ids[20:], list(range(19, 63)))])[0]
        assert_same(rest, expected[20:])


def test_weights_that_torch_walks_stay_the_models_own() -> None:
    for name in ("qwen2", "llama-bias-mha"):
        expected = own_logits(name, [1, 2, 3])
        model: Any = copy.deepcopy(make_model(name))
        runner = runner_of(model, "walked by torch")
        slot = runner.open()
        assert_same(runner.forward([Extension(slot, [1, 2, 3], [-1, 0, 1], 2)])[0][0], expected)
        with torch.no_grad():
            assert_same(model(torch.tensor([[1, 2, 3]])).logits[0, -1], expected)
        weights = model.model.layers[0].self_attn
        assert weights.q_proj.weight.untyped_storage().data_ptr() == weights.v_proj.weight.untyped_storage().data_ptr()


def test_bfloat16_and_float64_run_in_their_own_dtype() -> None:
    for dtype, tolerance in ((torch.bfloat16, 0.15), (torch.float64, 1e-6)):  # transformers norms in float32
        config = transformers.LlamaConfig(**{**SIZES, "initializer_range": 0.1})
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
        with torch.no_grad():
            expected = model(torch.tensor([[1, 2, 3, 4]]), use_cache=False).logits[0]
        for way in ("modules", "walked by torch"):
            runner = runner_of(model, way)
            slot = runner.open()
            runner.forward([Extension(slot, [1, 2], [-1, 0])])
            got = runner.forward([Extension(slot, [3, 4], [1, 2])])[0]
            assert runner.dtype == dtype
            assert got.dtype == (np.float64 if dtype == torch.float64 else np.float32)
            np.testing.assert_allclose(got, expected[2:].to(torch.float64), atol=tolerance, rtol=0)


def test_a_model_used_beside_its_generic_runner_says_so_and_works_again_after_release() -> None:
    model: Any = copy.deepcopy(make_model("gemma"))
    runner = plain_runner(model, max_model_len=16)
    said = "GemmaAttention was called by other code than CARD, which this model was given to: call it through CARD only"
    with pytest.raises(ModelError, match=said):
        model(torch.tensor([[1, 2, 3]]))
    runner.release()
    with torch.no_grad():
        assert_same(model(torch.tensor([[1, 2, 3]])).logits[0, -1], own_logits("gemma", [1, 2, 3]))


def test_a_model_that_hands_no_arguments_on_to_attention_is_told_apart_from_one_used_elsewhere() -> None:
    model: Any = copy.deepcopy(make_model("gemma"))
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, card_pass=None, forward=forward, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ModelError, match=r"^this gemma model cannot be run: it does not hand arguments .*; choose"):
        plain_runner(model, max_model_len=16)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Mamba", {"state_size": 4}, "recurrent"),
        ("Bloom", {}, "bloom models compute attention in code of their own"),
        ("Falcon", {}, "falcon models compute .* choose a model of another family"),
        ("Mpt", {}, "mpt models compute attention in code of their own, which cannot be taken over; choose a model"),
    ],
)
def test_models_that_cannot_run_row_wise_are_refused_by_reason(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    make = getattr(transformers, f"{family}TextConfig" if family == "Llama4" else f"{family}Config")
    left_out = ("num_key_value_heads", "head_dim") if family in ("Bloom", "Falcon", "Mpt") else ()
    sizes = {key: value for key, value in SIZES.items() if key not in left_out}
    model = getattr(transformers, f"{family}ForCausalLM")(make(**{**sizes, **changes}))
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match=reason):
        TorchRunner(model, max_model_len=16)
    assert model.config._attn_implementation == before


def test_fused_is_refused_where_it_does_not_fit_and_chosen_where_it_does() -> None:
    with pytest.raises(ModelError, match="no own pass"):
        plain_runner(make_model("gemma"), max_model_len=16, own_pass=True)
    with pytest.raises(ModelError, match="max_model_len"):
        plain_runner(make_model("llama"), max_model_len=65)
    assert plain_runner(make_model("llama"), max_model_len=16).has_own_pass
    assert not make_runner("gemma", "modules").has_own_pass
