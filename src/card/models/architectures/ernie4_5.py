"""ERNIE 4.5, dense: Llama whose neighbouring channels turn together."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import DecoderConfig


class Ernie45Fields(DecoderConfig):
    """Its config."""

    model_type = "ernie4_5"
    default_theta = 500000.0
    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int | list[int] = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int | list[int] = 16
    num_key_value_heads: int | list[int] | None = 2
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    use_bias: bool | None = False
    head_dim: int | list[int] | None = 128


ARCHITECTURE = Architecture(
    model_class="Ernie4_5ForCausalLM",
    config_class=Ernie45Fields,
    biases={"qkv": "use_bias", "out": "use_bias", "mlp": "use_bias"},
    turns_neighbours=True,
    gguf_name="ernie4_5",
)
