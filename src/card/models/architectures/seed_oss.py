"""Seed-OSS: Llama with biases of queries, keys and values, and heads of a size of their own."""

from dataclasses import replace

from card.models.architectures.architecture import PRE_NORMS, Architecture
from card.models.decoder_config import DecoderConfig


class SeedOssFields(DecoderConfig):
    """Its config."""

    model_type = "seed_oss"
    vocab_size: int = 155136
    intermediate_size: int | list[int] = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int | list[int] = 80
    num_key_value_heads: int | list[int] | None = 8
    max_position_embeddings: int = 524288
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    pretraining_tp: int = 1
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: float | int = 0.1
    residual_dropout: float | int = 0.1
    mlp_bias: bool = False
    head_dim: int | list[int] | None = 128


ARCHITECTURE = Architecture(
    model_class="SeedOssForCausalLM",
    config_class=SeedOssFields,
    biases={"qkv": "attention_bias", "out": "attention_out_bias", "mlp": "mlp_bias"},
    norms={**PRE_NORMS, "mlp_in": replace(PRE_NORMS["mlp_in"], gguf_name="post_attention_norm")},
    gguf_name="seed_oss",
)
