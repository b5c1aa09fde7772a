"""Seed-OSS: Llama with biases of queries, keys and values, and heads of a size of their own."""

from dataclasses import replace

from card.models.architectures.architecture import Architecture
from card.models.gguf_map import GgufMap
from card.models.parts import PRE_NORMS

ARCHITECTURE = Architecture(
    model_class="SeedOssForCausalLM",
    biases={"qkv": "attention_bias", "out": "attention_out_bias", "mlp": "mlp_bias"},
    norms={**PRE_NORMS, "mlp_in": replace(PRE_NORMS["mlp_in"], gguf_name="post_attention_norm")},
    gguf=GgufMap(name="seed_oss"),
)
