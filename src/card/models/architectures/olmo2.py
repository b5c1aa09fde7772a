"""OLMo 2: norms of what a block adds alone, and of all queries and all keys at once."""

from collections.abc import Mapping

from card.models.architectures.architecture import WIDE_NORMS, Architecture, NormPlace, Part
from card.models.decoder_config import DecoderConfig


class Olmo2Fields(DecoderConfig):
    """Its config."""

    model_type = "olmo2"
    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    attention_bias: bool = False


POST_NORMS: Mapping[NormPlace, Part] = {
    "attention_out": Part("post_attention_layernorm", "post_attention_norm", ("hidden",)),
    "mlp_out": Part("post_feedforward_layernorm", "post_ffw_norm", ("hidden",)),
}
ARCHITECTURE = Architecture(
    model_class="Olmo2ForCausalLM",
    config_class=Olmo2Fields,
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    norms={**POST_NORMS, **WIDE_NORMS},
    gguf_name="olmo2",
)
