"""Granite 3: Llama with four factors."""

from dataclasses import replace

from card.models.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_class="GraniteForCausalLM",
    scales={
        "attention": "attention_multiplier",
        "embedding": "embedding_multiplier",
        "residual": "residual_multiplier",
        "logits": "logits_scaling",
    },
    gguf=replace(LLAMA.gguf, name="granite", also="granitemoe"),
)
