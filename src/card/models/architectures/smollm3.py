"""SmolLM3: Llama with layers that know no positions."""

from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import DecoderConfig


class SmolLM3Fields(DecoderConfig):
    """Its config. Unless it says otherwise, every fourth layer knows no positions."""

    model_type = "smollm3"
    default_theta = 2000000.0
    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int | list[int] = 16
    num_key_value_heads: int | list[int] | None = 4
    max_position_embeddings: int = 32768
    pad_token_id: int | None = 128004
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **others: Any) -> None:
        """Write out which layers turn (1) and the kind of each layer."""
        if self.no_rope_layers is None:
            layers = range(1, self.num_hidden_layers + 1)
            self.no_rope_layers = [int(layer % self.no_rope_layer_interval != 0) for layer in layers]
        if self.layer_types is None:
            has_windows = self.use_sliding_window and self.sliding_window is not None
            self.layer_types = [
                "sliding_attention" if has_windows and not turns else "full_attention" for turns in self.no_rope_layers
            ]
        super().__post_init__(**others)


def turns(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary embeddings."""
    return bool(config.no_rope_layers[layer])


ARCHITECTURE = Architecture(
    model_class="SmolLM3ForCausalLM",
    config_class=SmolLM3Fields,
    biases={"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"},
    has_windows=True,
    turns=turns,
    gguf_name="smollm3",
    gguf_pairs=True,
)
