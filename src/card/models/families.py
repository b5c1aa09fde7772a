"""The configs of the decoder families that are read here: transformers' fields and defaults, in milliseconds.

transformers' own classes are not imported, because that of Llama brings a second of imports with it. A test compares
these with them, field by field. Values are checked against the annotations, which therefore are evaluated here.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


class DecoderConfig(PreTrainedConfig):
    """What all families have. A field without a value here has one in each family.

    Raises: almost anything, if a value is of another type than the field.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_dropout: int | float | None = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None

    def __post_init__(self, **others: Any) -> None:
        """Fill in what follows from other fields, then let transformers read the older names of some."""
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**others)


@strict
class LlamaFields(DecoderConfig):
    """A Llama model, or one of the many that are built like it."""

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    attention_bias: bool = False
    mlp_bias: bool = False


@strict
class MistralFields(DecoderConfig):
    """A Mistral model. Unless its config says otherwise, it has a window."""

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


class _QwenFields(DecoderConfig):
    """What Qwen2 and Qwen3 share: a window that counts only where it is switched on."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def __post_init__(self, **others: Any) -> None:
        """Drop the window that is switched off."""
        if not self.use_sliding_window:
            self.sliding_window = None
        super().__post_init__(**others)


@strict
class Qwen2Fields(_QwenFields):
    """A Qwen2 or Qwen2.5 model."""

    model_type = "qwen2"


@strict
class Qwen3Fields(_QwenFields):
    """A Qwen3 model."""

    model_type = "qwen3"
    head_dim: int = 128
    attention_bias: bool = False


FAMILIES: dict[str, tuple[str, type[DecoderConfig]]] = {  # by model_type: the architecture, and its config
    "llama": ("LlamaForCausalLM", LlamaFields),
    "mistral": ("MistralForCausalLM", MistralFields),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Fields),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Fields),
}
