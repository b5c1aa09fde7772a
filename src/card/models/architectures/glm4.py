"""GLM-4 (0414): norms of what a block adds too, and neighbours in the first half of each head turn together."""

from typing import Any

from card.models.architectures.architecture import LINEARS_WITH_GATE_UP, PRE_NORMS, Architecture, Part
from card.models.decoder_config import DecoderConfig


class Glm4Fields(DecoderConfig):
    """Its config. Unless it says otherwise, half of each head turns."""

    model_type = "glm4"
    vocab_size: int = 151552
    intermediate_size: int | list[int] = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int | list[int] = 2
    head_dim: int | list[int] = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 0.00000015625
    pad_token_id: int | None = 151329
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    attention_bias: bool = True

    def __post_init__(self, **others: Any) -> None:
        """State the tokens that end a text, and which part of a head turns."""
        others.setdefault("partial_rotary_factor", 0.5)
        if self.eos_token_id is None:
            self.eos_token_id = [151329, 151336, 151338]
        super().__post_init__(**others)


ARCHITECTURE = Architecture(
    model_class="Glm4ForCausalLM",
    config_class=Glm4Fields,
    biases={"qkv": "attention_bias"},
    linears=LINEARS_WITH_GATE_UP,
    norms={
        **PRE_NORMS,
        "attention_out": Part("post_self_attn_layernorm", "post_attention_norm", ("hidden",)),
        "mlp_out": Part("post_mlp_layernorm", "post_ffw_norm", ("hidden",)),
    },
    turns_neighbours=True,
    turns_parts=True,
    gguf_name="glm4",
)
