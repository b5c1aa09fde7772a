"""Mistral."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import DecoderConfig


class MistralFields(DecoderConfig):
    """Its config. Unless it says otherwise, there is a window."""

    model_type = "mistral"
    intermediate_size: int | list[int] = 14336
    num_key_value_heads: int | list[int] = 8
    max_position_embeddings: int = 4096 * 32
    sliding_window: int | None = 4096


ARCHITECTURE = Architecture(model_class="MistralForCausalLM", config_class=MistralFields, has_windows=True)
