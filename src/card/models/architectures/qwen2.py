"""Qwen2 and Qwen2.5."""

from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import DecoderConfig


class Qwen2Fields(DecoderConfig):
    """Its config, with a window that counts only where it is switched on."""

    model_type = "qwen2"
    vocab_size: int = 151936
    intermediate_size: int | list[int] = 22016
    num_key_value_heads: int | list[int] | None = 32
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def __post_init__(self, **others: Any) -> None:
        """Drop the window that is switched off."""
        if not self.use_sliding_window:
            self.sliding_window = None
        super().__post_init__(**others)


ARCHITECTURE = Architecture(
    model_class="Qwen2ForCausalLM",
    config_class=Qwen2Fields,
    biases={"qkv": True},
    gguf_name="qwen2",
    gguf_also="qwen2vl",
)
