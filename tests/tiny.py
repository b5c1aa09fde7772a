"""The sizes of the tiny random models that tests make; a test says only in what its own model differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

SIZES: Mapping[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NO_ENDS: Mapping[str, None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CLEAR = 0.3  # initializer_range that sets logits far enough apart that the order of additions decides no token
LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "beta_fast": 8.0,  # so that the few channels of a tiny head slow down by different shares
    "original_max_position_embeddings": 32,
}
LONG_ROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.5, 3.5, 5.5, 7.5],
    "original_max_position_embeddings": 32,
}


def tiny(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """Return what the configuration of a tiny model is made from, in the words of transformers."""
    return {**SIZES, "vocab_size": vocab_size, **changes}


def causal(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a random model of a config that writes text."""
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return model


def tiny_llama(vocab_size: int, *, seed: int = 0, noise: float = 0.0, **changes: Any) -> LlamaForCausalLM:
    """Return the same random Llama each time, its weights moved by ``noise`` times their own spread."""
    config = LlamaConfig(**tiny(vocab_size, **{"initializer_range": CLEAR, **changes}))
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    torch.set_rng_state(rng_state)
    return model.train(False)
