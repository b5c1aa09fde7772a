"""Hunyuan, dense: heads turn before they are normed, and angles slow down by a fixed factor of their base."""

from collections.abc import Mapping
from dataclasses import replace

from card.models.architectures.architecture import Architecture
from card.models.gguf_map import GgufMap
from card.models.parts import HEAD_NORMS, PRE_NORMS, NormPlace, Part

NORMS: Mapping[NormPlace, Part] = {
    **PRE_NORMS,
    "query": replace(HEAD_NORMS["query"], name="self_attn.query_layernorm"),
    "key": replace(HEAD_NORMS["key"], name="self_attn.key_layernorm"),
}
ARCHITECTURE = Architecture(
    model_class="HunYuanDenseV1ForCausalLM",
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    norms=NORMS,
    turns_first=True,
    scales_bases=True,
    gguf=GgufMap(name="hunyuan-dense"),
)
