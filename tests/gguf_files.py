"""Model folders written as GGUF files, as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from card.kernels.rotation import attention_factor
from card.models.architectures import Architecture, find_architecture
from card.models.demo import demo_folder
from tests import tiny

SIZES = {
    **tiny.SIZES,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": tiny.CLEAR,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG_ROPE = {
    **tiny.LONG_ROPE,
    "short_factor": [1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.1, 2.3],
    "long_factor": [1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 8.0],
}
GEMMA4_KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
_MADE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True},
    "llama, other heads": {"head_dim": 32},
    "llama, longer": {"rope_parameters": LLAMA3},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "attn_logit_softcapping": 7.0},
    "gemma3": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "num_hidden_layers": 6},
    "gemma4, own inputs": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": 2 * GEMMA4_KINDS,
        "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 9.0,
    },
    "gemma4, keys as values": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": 2 * GEMMA4_KINDS,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4, experts": {
        **GEMMA4,
        "num_hidden_layers": 3,
        "layer_types": GEMMA4_KINDS,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "granite": {
        "attention_multiplier": 0.125,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "llama, yarn": {"rope_parameters": tiny.YARN},
    "qwen3, yarn": {"head_dim": 32, "rope_parameters": {**tiny.YARN, "attention_factor": 1.25, "beta_slow": 2.0}},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 9},
    "phi3, longrope": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32},
    "phi3, longrope in part": {
        "rope_parameters": {
            **LONG_ROPE,
            **{name: LONG_ROPE[name][:6] for name in ("short_factor", "long_factor")},
            "partial_rotary_factor": 0.75,
            "attention_factor": 1.5,
        },
        "original_max_position_embeddings": 32,
    },
    "smollm3": {"num_hidden_layers": 4},
    "glm4": {"head_dim": 32},
    "olmo2": {},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 9},
    "exaone4, without windows": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 0.5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 32, "tie_word_embeddings": True},
    "qwen3_5": DELTA,
    "qwen3_5, a key each": {**DELTA, "linear_num_key_heads": 4, "tie_word_embeddings": True},
    "qwen3_5_moe": {
        **DELTA,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "qwen3_next": {
        **DELTA,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 9,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {**tiny.YARN, "truncate": False},
    },
    "granitemoe": {
        "num_local_experts": 6,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
}
SHARED_EXPERTS = {
    "num_hidden_layers": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
_MADE |= {
    "glm4_moe": {**SHARED_EXPERTS, "head_dim": 32, "attention_bias": True},
    "glm4_moe, norms of heads": {**SHARED_EXPERTS, "use_qk_norm": True, "norm_topk_prob": False},
    "dots1": {**SHARED_EXPERTS, "head_dim": 32, "sliding_window": None},
    "ministral3": {
        "head_dim": 32,
        "rope_parameters": {
            **tiny.YARN,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": {
        "num_hidden_layers": 4,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 2,
    },
    "granitemoeshared": {**_MADE["granitemoe"], "shared_intermediate_size": 64},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 9},
    "minimax_m2": {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 6, "moe_topk": 2},
    "seed_oss": {"head_dim": 32},
}


def entry_of(model_type: str) -> Architecture:
    """Return what a model is made of; test_architectures.py compares its names with llama.cpp's."""
    entry = find_architecture(model_type) or find_architecture(f"{model_type}_text")
    assert entry is not None
    return entry


def classes_of(kind: str) -> tuple[type[PreTrainedModel], type[Any]]:
    """Return transformers' classes of a model of this kind and of its config."""
    entry = entry_of(kind.partition(",")[0])
    return getattr(transformers, entry.model_class), CONFIG_MAPPING[entry.model_type]


KINDS = {kind: (*classes_of(kind), more) for kind, more in _MADE.items()}
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_BUFFERS = ("expert_bias", "layer_scalar", "e_score_correction_bias")  # that files have
_PAIRED = ("llama", "granite", "granitemoe", "smollm3", "mistral3")
_WITH_SIGMOIDS = ("lfm2_moe", "glm4_moe", "dots1", "minimax_m2")
_FACTORS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
}
_ADD: Mapping[type, Any] = {
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    str: gguf.GGUFWriter.add_string,
    list: gguf.GGUFWriter.add_array,
}


def demo_tokenizer() -> PreTrainedTokenizerBase:
    """Return the demo pair's tokenizer."""
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(demo_folder("target"))
    return tokenizer


def save_model(
    folder: Path,
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    noise: float = 0.0,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Write a tiny random model of this kind as transformers does.

    Args:
        noise: tells a draft from its target.
        sizes: in place of others.
    """
    model_class, config_class, more = KINDS[kind]
    more = {**more, **(sizes or {})}
    vocab = max(tokenizer.get_vocab().values()) + 1
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if more.get("hidden_size_per_layer_input"):
        more["vocab_size_per_layer_input"] = vocab
    config = config_class(**{**SIZES, "vocab_size": vocab, "pad_token_id": tokenizer.pad_token_id, **ends, **more})
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for _, weight in _tensors(model):
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
        for name, factor in model.named_buffers():
            if name.endswith("layer_scalar"):
                factor.copy_(1 + torch.randn(1) / 9)
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def round_to(folder: Path, kind: Kind) -> None:
    """Replace the weights in a folder by what is left of them after quantising."""
    model = _class_of(folder).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind).copy()))
    model.save_pretrained(folder)


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: Kind = Kind.F32,
    pre: str = "smollm",
    num_pads: int = 0,
    without: tuple[str, ...] = (),
    merges: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    general: Mapping[str, Any] | None = None,
    blocks: Mapping[str, tuple[Kind, np.ndarray]] | None = None,
    joins_experts: bool | None = False,
    experts: Kind | None = None,
    part_tensors: int = 0,
    small_first: bool = False,
    other_cuts: bool = False,
    named: str | None = None,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model in ``folder`` as a GGUF file, or in several parts, of which the first is returned.

    Args:
        kind: of all matrices; norms and biases are in float32.
        pre: llama.cpp's name of the rule that splits text.
        num_pads: tokens behind the last one that only pad the vocabulary, with rows of the embedding.
        without: tensors that are left out.
        merges: in place of the tokenizer's own.
        metadata: entries of the architecture that take the place of others, or stand beside them.
        general: further entries, by their whole names.
        blocks: types and rows of blocks [out, bytes] of tensors, or [E, out, bytes], in place of their weights.
        joins_experts: gate and up of experts are one tensor; None: each expert has its own, as in the first files.
        experts: kind of theirs; None: that of all matrices.
        part_tensors: how many tensors a part has; 0: all are in one file.
        small_first: the first part has no tensors.
        other_cuts: queries, keys and values of Phi-3 are apart, and inputs of Qwen3-Next one, as in some files.
        named: another architecture.
        more: tensors beside the model's own.
    """
    config = json.loads((folder / "config.json").read_text())
    entry = entry_of(config["model_type"])
    arch = named or entry.gguf.name or config["model_type"]
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=part_tensors, small_first_shard=small_first)
    writer.add_string("general.name", "tiny")
    facts = {f"{arch}.{key}": value for key, value in {**_facts(config), **(metadata or {})}.items()}
    for key, value in {**facts, **(general or {})}.items():
        _ADD[type(value)](writer, key, value)
    _add_tokenizer(writer, PreTrainedTokenizerFast.from_pretrained(folder), pre, num_pads, merges)
    model = _class_of(folder).from_pretrained(folder, dtype=torch.float32)
    for name, weight in _tensors(model):
        layer, _, inside = name.removeprefix("model.layers.").partition(".")
        if ".experts." in name:
            joined = _expert_tensors(
                name, weight.detach().numpy(), joins_experts=joins_experts, is_interleaved=arch == "gpt-oss"
            )
            for own, values in joined:
                if own not in without:
                    of = Kind.F32 if own.endswith("bias") else experts or kind
                    of, stored = (blocks or {}).get(own) or (of, quantize(values, of))
                    writer.add_tensor(own, stored, raw_dtype=of)
        elif cut := _cut(inside, weight.detach().numpy(), config, other_cuts=other_cuts):
            for own, values in cut.items():
                if f"blk.{layer}.{own}.weight" in without:
                    continue
                writer.add_tensor(f"blk.{layer}.{own}.weight", quantize(values, kind), raw_dtype=kind)
        elif (own := _own_name(name, entry)) not in without:
            values = _stored(own, inside, weight.detach().numpy(), arch, config)
            if num_pads and own in ("token_embd.weight", "output.weight"):
                values = np.concatenate([values, np.zeros((num_pads, values.shape[1]), np.float32)])
            is_float = values.ndim == 1 or own.endswith("conv1d.weight") or ".conv." in own or "ffn_gate_inp" in own
            of = Kind.F32 if is_float else kind
            of, stored = (blocks or {}).get(own) or (of, quantize(values, of))
            writer.add_tensor(own, stored, raw_dtype=of)
    _add_more(writer, more or {}, kind)
    for own, factors in _rotation_tensors(config):
        if own not in without:
            writer.add_tensor(own, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    written = writer.format_shard_names(file)
    writer.close()
    return Path(written[0])


def _add_more(writer: gguf.GGUFWriter, more: Mapping[str, np.ndarray], kind: Kind) -> None:
    for own, values in more.items():
        if values.dtype.kind == "i":
            writer.add_tensor(own, values)
            continue
        of = Kind.F32 if values.ndim == 1 or "ffn_gate_inp" in own else kind
        writer.add_tensor(own, quantize(values, of), raw_dtype=of)


def _own_name(name: str, entry: Architecture) -> str:
    """Return what files call a tensor."""
    layer, _, inside = name.removeprefix("model.layers.").partition(".")
    names = {part.name: part.gguf_name for part in (*entry.parts, *entry.in_files.parts)}
    if inside in names:  # of a vector
        return f"blk.{layer}.{names[inside]}"
    stem, _, part = name.rpartition(".")
    if stem.startswith("model.layers."):
        return f"blk.{layer}.{names[inside.rpartition('.')[0]]}.{part}"
    last, gguf_last = entry.last_norm
    return f"{(_OUTSIDE | {f'model.{last}': gguf_last})[stem]}.{part}"


def _stored(
    own: str, inside: str, values: np.ndarray[Any, Any], arch: str, config: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    """Return what files hold of a tensor."""
    part = inside.rpartition(".")[0]
    is_vector = entry_of(config["model_type"]).is_vector(f".{inside}")
    values = tiled(arch, inside if is_vector else part, values, config)
    if inside.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)
    adds_one = arch.startswith(("gemma2", "gemma3", "qwen35", "qwen3next")) and part != "linear_attn.norm"
    if adds_one and values.ndim == 1 and not is_vector:
        values = values + np.float32(1.0)
    if arch in _PAIRED and part in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if own.endswith(("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")) and values.ndim > 1:
        values = values[0]
    if part in ("conv.conv", "linear_attn.conv1d"):
        values = values[:, 0]
    return np.ascontiguousarray(values)


def _cut(
    inside: str, weight: np.ndarray[Any, Any], config: Mapping[str, Any], *, other_cuts: bool
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors that files have in the place of one; none for another weight."""
    if inside == "shared_mlp.input_linear.weight":
        return dict(zip(("ffn_gate_shexp", "ffn_up_shexp"), np.split(weight, 2), strict=True))
    if inside == "self_attn.qkv_proj.weight" and other_cuts:
        size = weight.shape[0] // (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
        ends = size * np.cumsum([config["num_attention_heads"], config["num_key_value_heads"]])
        return dict(zip(("attn_v", "attn_q", "attn_k"), _rolled(np.split(weight, ends)), strict=True))
    if inside != "linear_attn.in_proj_qkvz.weight":
        return {}
    return {"ssm_in": weight} if other_cuts else _inputs(weight, config)


def _rolled(parts: list[Any]) -> list[Any]:
    """Return the last one first: files may have them in any order."""
    return [parts[-1], *parts[:-1]]


def _inputs(weight: np.ndarray[Any, Any], config: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return what Qwen3-Next's files hold of the inputs of the delta rule, which its folders group by keys."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = np.split(weight.reshape(keys, -1, weight.shape[1]), np.cumsum([size, size, of_values]), axis=1)
    query, key, value, gates = (part.reshape(-1, weight.shape[1]) for part in parts)
    return {"attn_qkv": np.concatenate([query, key, value]), "attn_gate": np.ascontiguousarray(gates)}


def tiled(arch: str, name: str, values: np.ndarray[Any, Any], config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return a weight of the delta rule with value heads that share a key apart, where files have them so."""
    if arch not in ("qwen35", "qwen35moe") or "linear_attn" not in name or name.endswith("norm"):
        return values
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if name.endswith("out_proj"):
        return tiled(arch, "linear_attn.in_proj_z", values.T, config).T
    has_keys = name.endswith(("in_proj_qkv", "conv1d"))
    before = 2 * keys * config["linear_key_head_dim"] if has_keys else 0
    of_values = values[before:]
    moved = of_values.reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1).reshape(of_values.shape)
    return np.concatenate([values[:before], moved])


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers that files have."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(_BUFFERS))


def _expert_tensors(
    name: str, weight: np.ndarray[Any, Any], *, joins_experts: bool | None, is_interleaved: bool
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the tensors of a layer's experts, of transformers' one for gate and up, or of that for down."""
    layer, what = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
    rows, half = weight, weight.shape[1] // 2
    both = slice(0, half), slice(half, None)
    if is_interleaved:
        rows, both = weight.swapaxes(1, -1), (slice(0, None, 2), slice(1, None, 2))
    if "down_proj" in name:
        parts = {"down": rows}
    elif joins_experts:
        parts = {"gate_up": np.concatenate([rows[:, its] for its in both], axis=1)}
    else:
        parts = {part: rows[:, its] for part, its in zip(("gate", "up"), both, strict=True)}
    for part, values in parts.items():
        if joins_experts is not None:
            yield f"blk.{layer}.ffn_{part}_exps.{what}", np.ascontiguousarray(values)
            continue
        for expert, its in enumerate(values):
            yield f"blk.{layer}.ffn_{part}.{expert}.{what}", np.ascontiguousarray(its)


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma4_text":
        return _gemma4_facts(config)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_heads, entry = config["num_key_value_heads"], entry_of(config["model_type"])
    stated = {name: config[older] for name, older in entry.config.older_names.items() if older in config} | {**config}
    taps, delta = config.get("conv_L_cache"), config.get("linear_num_value_heads")
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": _mlp_width(config),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": (
            kv_heads if taps is None else [0 if kind == "conv" else kv_heads for kind in config["layer_types"]]
        ),
        **({} if delta is None else _delta_facts(config)),
        **({"attention.layer_norm_rms_epsilon": config["norm_eps"]} if "norm_eps" in config else {}),
        **({"attention.layer_norm_rms_epsilon": config["rms_norm_eps"]} if "rms_norm_eps" in config else {}),
        **({"attention.layer_norm_epsilon": config["layer_norm_eps"]} if "layer_norm_eps" in config else {}),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        **_scaling(rope, config["max_position_embeddings"]),
        **{key: float(config[field]) for field, key in _FACTORS.items() if config.get(field) is not None},
        **({"attention.sliding_window": config["sliding_window"]} if config.get("sliding_window") else {}),
        **{
            key: stated[field] for field, key in {**entry.gguf_experts, **entry.gguf_numbers}.items() if field in stated
        },
        **({} if (rate := rope.get("llama_4_scaling_beta")) is None else {"attention.temperature_scale": rate}),
        **({"expert_gating_func": 2} if config["model_type"] in _WITH_SIGMOIDS else {}),
        **({"expert_weights_norm": config["norm_topk_prob"]} if "n_routed_experts" in config else {}),
    }


def _delta_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": 4,
        "rope.dimension_sections": [2, 1, 1, 0],
    }


def _scaling(rope: Mapping[str, Any], num_positions: int) -> dict[str, Any]:
    """Return the keys of yarn and longrope, as llama.cpp's converter writes them."""
    kind = rope.get("rope_type")
    if kind not in ("yarn", "longrope"):
        return {}
    context = {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    if kind == "longrope":
        growth = attention_factor(rope, num_positions)
        return {**context, "rope.scaling.attn_factor": growth}  # such files name no type
    names = {"factor": "factor", "attention_factor": "yarn_attn_factor", "mscale_all_dim": "yarn_log_multiplier"}
    names |= {name: f"yarn_{name}" for name in ("beta_fast", "beta_slow")}
    stated = {f"rope.scaling.{key}": float(rope[name]) for name, key in names.items() if rope.get(name) is not None}
    return {"rope.scaling.type": "yarn", **context, **stated}


def _gemma4_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    full = next(iter(config["per_layer_config"].values()))
    is_full = [kind == "full_attention" for kind in config["layer_types"]]
    kv_heads, shared = config["num_key_value_heads"], config["num_kv_shared_layers"]
    widths = [config["intermediate_size"]] * len(is_full)
    if config["use_double_wide_mlp"]:
        widths[-shared:] = [2 * widths[0]] * shared
    cap = config["final_logit_softcapping"]
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": len(is_full),
        "feed_forward_length": widths if config["use_double_wide_mlp"] else widths[0],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [full.get("num_key_value_heads", kv_heads) if one else kv_heads for one in is_full],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [not one for one in is_full],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        **({} if cap is None else {"final_logit_softcapping": cap}),
        **(
            {}
            if config["num_experts"] is None
            else {
                "expert_count": config["num_experts"],
                "expert_used_count": config["top_k_experts"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
            }
        ),
    }


def _mlp_width(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP; LFM2 states what it was made from."""
    if not config.get("block_auto_adjust_ff_dim"):
        return int(config["intermediate_size"])
    multiple = config["block_multiple_of"]
    width = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
    return -(-width // multiple) * multiple


def _add_tokenizer(writer: Any, tokenizer: Any, pre: str, num_pads: int, merges: Sequence[str] | None) -> None:
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    special = {one["id"] for one in core["added_tokens"] if one["special"]}
    tokens = [by_id[token_id] for token_id in range(len(by_id))]
    types = [3 if token_id in special else 1 for token_id in range(len(tokens))]
    for idx in range(num_pads):
        tokens.append(f"[PAD{len(by_id) + idx}]")
        types.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or [" ".join(merge) for merge in core["model"]["merges"]])
    for name in ("bos", "eos", "pad"):
        if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _rotation_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the tensors that angles are divided by."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", np.repeat([1.0, 1e30], [turning, pairs - turning]).astype(np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config["head_dim"])
    if rope.get("rope_type") == "longrope":
        for length in ("short", "long"):
            yield f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32)


def _llama3_factors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    factors = []
    for idx in range(0, size, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (idx / size)
        old = rope["original_max_position_embeddings"]
        if length < old / rope["high_freq_factor"]:
            factors.append(1.0)
        elif length > old / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (old / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _class_of(folder: Path) -> Any:
    return getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
