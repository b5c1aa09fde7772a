"""Model folders written as GGUF files, as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from card.kernels.rotation import attention_factor
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
KINDS: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "llama, other heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 32}),
    "llama, longer": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "attn_logit_softcapping": 7.0},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "num_hidden_layers": 6},
    ),
    "gemma4, own inputs": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": 2 * GEMMA4_KINDS,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4, keys as values": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": 2 * GEMMA4_KINDS,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4, experts": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
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
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": tiny.YARN}),
    "qwen3, yarn": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 32, "rope_parameters": {**tiny.YARN, "attention_factor": 1.25, "beta_slow": 2.0}},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"partial_rotary_factor": 0.75, "sliding_window": 9}),
    "phi3, longrope": (
        Phi3ForCausalLM,
        Phi3Config,
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32},
    ),
    "phi3, longrope in part": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "rope_parameters": {
                **LONG_ROPE,
                **{name: LONG_ROPE[name][:6] for name in ("short_factor", "long_factor")},
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.5,
            },
            "original_max_position_embeddings": 32,
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"num_hidden_layers": 4}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 32}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "exaone4": (Exaone4ForCausalLM, Exaone4Config, {"num_hidden_layers": 4, "sliding_window": 9}),
    "exaone4, without windows": (
        Exaone4ForCausalLM,
        Exaone4Config,
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 0.5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config,
        {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 32, "tie_word_embeddings": True},
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA),
    "qwen3_5, a key each": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {**DELTA, "linear_num_key_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {
            **DELTA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {
            **DELTA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "lfm2_moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "head_dim": 32,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {**tiny.YARN, "truncate": False},
        },
    ),
    "granitemoe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig,
        {
            "num_local_experts": 6,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
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
KINDS |= {
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, {**SHARED_EXPERTS, "head_dim": 32, "attention_bias": True}),
    "glm4_moe, norms of heads": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        {**SHARED_EXPERTS, "use_qk_norm": True, "norm_topk_prob": False},
    ),
    "dots1": (Dots1ForCausalLM, Dots1Config, {**SHARED_EXPERTS, "head_dim": 32, "sliding_window": None}),
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config,
        {
            "head_dim": 32,
            "rope_parameters": {
                **tiny.YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config, {"head_dim": 32}),
    "ernie4_5_moe": (
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
        },
    ),
    "granitemoeshared": (
        GraniteMoeSharedForCausalLM,
        GraniteMoeSharedConfig,
        {**KINDS["granitemoe"][2], "shared_intermediate_size": 64},
    ),
    "olmo3": (Olmo3ForCausalLM, Olmo3Config, {"num_hidden_layers": 4, "sliding_window": 9}),
    "minimax_m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 16},
    ),
    "hunyuan_v1_dense": (HunYuanDenseV1ForCausalLM, HunYuanDenseV1Config, {"head_dim": 32}),
    "hunyuan_v1_moe": (
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config,
        {"head_dim": 32, "num_experts": 6, "moe_topk": 2},
    ),
    "seed_oss": (SeedOssForCausalLM, SeedOssConfig, {"head_dim": 32}),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_BUFFERS = ("expert_bias", "layer_scalar", "e_score_correction_bias")  # that files have
_VECTORS = {  # whose names end there
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "self_attn.sinks": "attn_sinks.weight",
}
_ARCHITECTURES = {
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "lfm2_moe": "lfm2moe",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "granitemoeshared": "granitemoe",
    "ernie4_5_moe": "ernie4_5-moe",
}
# Files name their post_attention_layernorm after attention, as transformers.
_POST_NORMED = ("gemma2", "gemma3", "gemma4", "olmo2", "exaone4", "gpt-oss", "qwen35", "qwen35moe", "qwen3next")
_POST_NORMED += ("glm4moe", "seed_oss")
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
_OF_EXPERTS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_topk": "expert_used_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
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
    arch = config["model_type"].removesuffix("_text")
    arch = named or _ARCHITECTURES.get(arch, arch)
    names = {**_NAMES, **({"post_attention_layernorm": "post_attention_norm"} if arch in _POST_NORMED else {})}
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
        elif (own := _own_name(name, names)) not in without:
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


def _own_name(name: str, names: Mapping[str, str]) -> str:
    """Return what files call a tensor."""
    layer, _, inside = name.removeprefix("model.layers.").partition(".")
    if inside in _VECTORS:
        return f"blk.{layer}.{_VECTORS[inside]}"
    stem, _, part = name.rpartition(".")
    if stem.startswith("model.layers."):
        return f"blk.{layer}.{names[inside.rpartition('.')[0]]}.{part}"
    return f"{names[stem]}.{part}"


def _stored(
    own: str, inside: str, values: np.ndarray[Any, Any], arch: str, config: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    """Return what files hold of a tensor."""
    part = inside.rpartition(".")[0]
    values = tiled(arch, inside if inside in _VECTORS else part, values, config)
    if inside.endswith("A_log"):
        return -np.exp(values.astype(np.float64)).astype(np.float32)
    adds_one = arch.startswith(("gemma2", "gemma3", "qwen35", "qwen3next")) and part != "linear_attn.norm"
    if adds_one and values.ndim == 1 and inside not in _VECTORS:
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
    kv_heads = config["num_key_value_heads"]
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
        **({} if taps is None else {"shortconv.l_cache": taps}),
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
        **{key: config[field] for field, key in _OF_EXPERTS.items() if field in config},
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
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return next(one for one, _, _ in KINDS.values() if one.__name__ == name)
