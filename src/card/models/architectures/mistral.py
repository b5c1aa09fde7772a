"""Mistral."""

from huggingface_hub.dataclasses import strict

from card.models.architectures.architecture import Architecture, DecoderConfig


@strict
class MistralFields(DecoderConfig):
    """Its config. Unless it says otherwise, there is a window."""

    model_type = "mistral"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 4096 * 32
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sliding_window: int | None = 4096


ARCHITECTURE = Architecture(model_class="MistralForCausalLM", config_class=MistralFields)
