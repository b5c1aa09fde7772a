"""Configs and generation configs as makers publish them, all their fields, with sizes for a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

# What takes the place of the published sizes. A published share of KV heads and a stated head size stay different.
VOCAB = 128
SMALL: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

_LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "use_cache": True,
}
_LLAMA31 = {
    **_LLAMA,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "rope_scaling": _LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 32,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}

_GEMMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_GEMMA2 = {
    **_GEMMA,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 224,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "transformers_version": "4.42.4",
}
_GEMMA3 = {
    **_GEMMA,
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "transformers_version": "4.50.0.dev0",
}

_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_OTHER = {
    **_ENDS,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_PHI3 = {
    **{name: value for name, value in _OTHER.items() if name != "attention_bias"},
    "architectures": ["Phi3ForCausalLM"],
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "transformers_version": "4.40.2",
}
_EXAONE4 = {
    **{name: value for name, value in _OTHER.items() if name != "attention_bias"},
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 32,
    "model_type": "exaone4",
    "rope_scaling": {**_LLAMA3_SCALING, "factor": 16.0},
    "transformers_version": "4.54.0.dev0",
}
_FULL = ["full_attention", "full_attention"]
_WINDOWED = ["sliding_attention", "full_attention"]

# By name: what config.json has, and whether the model is walked directly.
CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "Llama 2": (
        {
            **{name: value for name, value in _LLAMA.items() if name not in ("attention_bias", "mlp_bias")},
            "_name_or_path": "meta-llama/Llama-2-7b-chat-hf",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 4,
            "rope_scaling": None,
            "torch_dtype": "float16",
            "transformers_version": "4.32.0.dev0",
        },
        True,
    ),
    "Llama 2, without rope_theta and KV heads": (
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf",
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "pad_token_id": 0,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
        },
        True,
    ),
    "Llama 3": (
        {
            **_LLAMA,
            "bos_token_id": 128000,
            "eos_token_id": 128009,
            "max_position_embeddings": 8192,
            "rope_scaling": None,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.0.dev0",
        },
        True,
    ),
    "Llama 3.1": (_LLAMA31, True),
    "Llama 3.2 1B": (
        {
            **_LLAMA31,
            "head_dim": 16,
            "rope_scaling": {**_LLAMA3_SCALING, "factor": 32.0},
            "tie_word_embeddings": True,
            "transformers_version": "4.45.0.dev0",
        },
        True,
    ),
    "Llama 3.3": ({**_LLAMA31, "head_dim": 16, "transformers_version": "4.47.0.dev0"}, True),
    "R1-Distill-Llama": (
        {**_LLAMA31, "eos_token_id": 128001, "head_dim": 16, "transformers_version": "4.43.0.dev0"},
        True,
    ),
    "Llama 3.1, numbers as integers, type for rope_type": (
        {
            **_LLAMA31,
            "attention_dropout": 0,
            "rope_theta": 500000,
            "rope_scaling": {
                "type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 8192,
            },
        },
        True,
    ),
    "Llama 3.1, newer form": (
        {
            **{name: value for name, value in _LLAMA31.items() if not name.startswith(("rope_", "torch_"))},
            "dtype": "bfloat16",
            "rope_parameters": {**_LLAMA3_SCALING, "rope_theta": 500000.0},
            "transformers_version": "5.0.0",
        },
        True,
    ),
    "Llama 3.1, without eos_token_id": (
        {name: value for name, value in _LLAMA31.items() if name != "eos_token_id"},
        True,
    ),
    "Llama, linear scaling": (
        {
            **_LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 16384,
            "num_key_value_heads": 4,
            "rope_scaling": {"factor": 8.0, "type": "linear"},
            "torch_dtype": "float16",
            "transformers_version": "4.31.0",
        },
        True,
    ),
    "Llama, dynamic scaling": (
        {
            **_LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 4096,
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.36.0",
        },
        False,
    ),
    "TinyLlama": (
        {
            **_LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.35.0",
        },
        True,
    ),
    "SmolLM2": (
        {
            **_LLAMA,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "pad_token_id": 2,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "transformers_version": "4.42.3",
        },
        True,
    ),
    "Granite 3.3 2B": (
        {
            **_LLAMA,
            "architectures": ["GraniteForCausalLM"],
            "attention_multiplier": 0.015625,
            "bos_token_id": 0,
            "embedding_multiplier": 12.0,
            "eos_token_id": 0,
            "logits_scaling": 8.0,
            "max_position_embeddings": 131072,
            "model_type": "granite",
            "pad_token_id": 0,
            "residual_multiplier": 0.22,
            "rope_scaling": None,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.49.0",
        },
        True,
    ),
    "Mistral 7B v0.1": (
        {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096, "transformers_version": "4.34.0.dev0"},
        True,
    ),
    "Mistral 7B v0.1, shorter window": ({**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 8}, True),
    "Mistral 7B v0.3": (_MISTRAL, True),
    "Mistral, without sliding_window": (
        {name: value for name, value in _MISTRAL.items() if name != "sliding_window"},
        True,
    ),
    "Mistral Nemo": (
        {
            **_MISTRAL,
            "head_dim": 32,
            "max_position_embeddings": 131072,
            "transformers_version": "4.43.0.dev0",
        },
        True,
    ),
    "Qwen2": ({**_QWEN2, "sliding_window": 32768, "transformers_version": "4.40.1"}, True),
    "Qwen2.5": (_QWEN2, True),
    "Qwen2.5 0.5B": ({**_QWEN2, "max_window_layers": 21, "sliding_window": 32768, "tie_word_embeddings": True}, True),
    "Qwen2.5, long texts": (
        {**_QWEN2, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        False,
    ),
    "Qwen2.5-Coder": ({**_QWEN2, "rope_scaling": None, "transformers_version": "4.44.0"}, True),
    "Qwen2.5, without eos_token_id": (
        {name: value for name, value in _QWEN2.items() if name != "eos_token_id"},
        True,
    ),
    "R1-Distill-Qwen": (
        {
            **_QWEN2,
            "eos_token_id": 151643,
            "max_position_embeddings": 131072,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "use_mrope": False,
            "transformers_version": "4.44.0",
        },
        True,
    ),
    "Qwen2, window from layer 1": (
        {**_QWEN2, "max_window_layers": 1, "sliding_window": 8, "use_sliding_window": True},
        False,
    ),
    "Qwen3": (_QWEN3, True),
    "Qwen3, newer form": (
        {
            **{name: value for name, value in _QWEN3.items() if not name.startswith(("rope_", "torch_"))},
            "dtype": "bfloat16",
            "layer_types": ["full_attention", "full_attention"],
            "pad_token_id": None,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "transformers_version": "5.0.0",
        },
        True,
    ),
    "Gemma 2 2B": (_GEMMA2, True),
    "Gemma 2, shorter window": ({**_GEMMA2, "sliding_window": 8}, True),
    "Gemma 3 1B": (_GEMMA3, True),
    "Gemma 3, shorter window": ({**_GEMMA3, "sliding_window": 8, "sliding_window_pattern": 2}, True),
    "Gemma 3 4B, its text model": (
        {**_GEMMA3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        True,
    ),
    "Gemma 3 270M, newer form": (
        {
            **{name: value for name, value in _GEMMA3.items() if not name.startswith(("rope_", "torch_"))},
            "_sliding_window_pattern": 6,
            "dtype": "bfloat16",
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "transformers_version": "5.0.0",
            "use_bidirectional_attention": False,
        },
        True,
    ),
    "Phi-3 mini 4k": (_PHI3, True),
    "Phi-4": ({**_PHI3, "sliding_window": None, "transformers_version": "4.47.0"}, True),
    "Phi-3, a part of each head": ({**_PHI3, "partial_rotary_factor": 0.75, "sliding_window": 8}, True),
    "SmolLM3": (
        {
            **_OTHER,
            "architectures": ["SmolLM3ForCausalLM"],
            "layer_types": _FULL,
            "mlp_bias": False,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 0],
            "pretraining_tp": 2,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "transformers_version": "4.54.0.dev0",
            "use_sliding_window": False,
        },
        True,
    ),
    "GLM-4 9B 0414": (
        {
            **{name: value for name, value in _OTHER.items() if name != "rope_scaling"},
            "architectures": ["Glm4ForCausalLM"],
            "attention_bias": True,
            "head_dim": 32,
            "model_type": "glm4",
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "transformers_version": "4.52.0.dev0",
        },
        True,
    ),
    "OLMo 2": (
        {
            **_OTHER,
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "transformers_version": "4.47.0.dev0",
        },
        True,
    ),
    "OLMo 3, shorter window": (
        {
            **_OTHER,
            "architectures": ["Olmo3ForCausalLM"],
            "layer_types": _WINDOWED,
            "model_type": "olmo3",
            "sliding_window": 8,
            "transformers_version": "4.57.0.dev0",
        },
        True,
    ),
    "EXAONE 4 1.2B": ({**_EXAONE4, "layer_types": _FULL, "sliding_window": None}, True),
    "EXAONE 4 32B, shorter window": ({**_EXAONE4, "layer_types": _WINDOWED, "sliding_window": 8}, True),
    "Command R7B": (
        {
            **{name: value for name, value in _OTHER.items() if name not in ("rms_norm_eps", "tie_word_embeddings")},
            "architectures": ["Cohere2ForCausalLM"],
            "cache_implementation": "hybrid",
            "head_dim": 16,
            "layer_norm_eps": 1e-05,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "model_type": "cohere2",
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rope_theta": 50000,
            "rotary_pct": 1.0,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "transformers_version": "4.48.0.dev0",
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
        True,
    ),
    "LFM2 1.2B": (
        {
            "architectures": ["Lfm2ForCausalLM"],
            "block_auto_adjust_ff_dim": True,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_ffn_dim_multiplier": 1.0,
            "block_mlp_init_scale": 1.0,
            "block_multiple_of": 256,
            "block_norm_eps": 1e-05,
            "block_out_init_scale": 1.0,
            "block_use_swiglu": True,
            "block_use_xavier_init": True,
            "bos_token_id": 1,
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "conv_use_xavier_init": True,
            "eos_token_id": 7,
            "full_attn_idxs": [1],
            "initializer_range": 0.02,
            "max_position_embeddings": 128000,
            "model_type": "lfm2",
            "norm_eps": 1e-05,
            "num_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "rope_theta": 1000000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0",
            "use_cache": True,
            "use_pos_enc": True,
        },
        True,
    ),
    "Ministral": (
        {
            **_MISTRAL,
            "architectures": ["MinistralForCausalLM"],
            "head_dim": 32,
            "layer_types": _WINDOWED,
            "model_type": "ministral",
            "sliding_window": 8,
        },
        True,
    ),
}


def save_published(folder: Path, name: str, generation_config: Mapping[str, Any] | None = None) -> None:
    """Write a published config with small sizes, random weights for it, and a generation config if there is one."""
    config = {**CONFIGS[name][0], **SMALL}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float32"  # where no tokens tie
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
