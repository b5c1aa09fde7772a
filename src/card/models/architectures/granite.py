"""Granite 3: Llama with four factors."""

from dataclasses import replace

from card.models.architectures.llama import ARCHITECTURE as LLAMA
from card.models.architectures.llama import LlamaFields


class GraniteFields(LlamaFields):
    """Its config."""

    model_type = "granite"
    embedding_multiplier: float | int = 1.0
    logits_scaling: float | int = 1.0
    residual_multiplier: float | int = 1.0
    attention_multiplier: float | int = 1.0


ARCHITECTURE = replace(
    LLAMA,
    model_class="GraniteForCausalLM",
    config_class=GraniteFields,
    scales={
        "attention": "attention_multiplier",
        "embedding": "embedding_multiplier",
        "residual": "residual_multiplier",
        "logits": "logits_scaling",
    },
    gguf_name="granite",
    gguf_also="granitemoe",
)
