"""Hunyuan, dense: heads turn before they are normed, and angles slow down by a fixed factor of their base."""

from collections.abc import Mapping
from dataclasses import replace

from card.models.architectures.architecture import HEAD_NORMS, PRE_NORMS, Architecture, NormPlace, Part
from card.models.decoder_config import DecoderConfig


class HunyuanDenseFields(DecoderConfig):
    """Its config."""

    model_type = "hunyuan_v1_dense"
    vocab_size: int = 290943
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    eod_token_id: int | None = 3
    pretraining_tp: int = 1
    attention_bias: bool = False


NORMS: Mapping[NormPlace, Part] = {
    **PRE_NORMS,
    "query": replace(HEAD_NORMS["query"], name="self_attn.query_layernorm"),
    "key": replace(HEAD_NORMS["key"], name="self_attn.key_layernorm"),
}
ARCHITECTURE = Architecture(
    model_class="HunYuanDenseV1ForCausalLM",
    config_class=HunyuanDenseFields,
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    norms=NORMS,
    turns_first=True,
    scales_bases=True,
    gguf_name="hunyuan-dense",
)
