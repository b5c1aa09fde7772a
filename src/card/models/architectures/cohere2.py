"""Cohere 2 (Command R7B, Command A): attention and the MLP read the same rows, and norms subtract the mean."""

from typing import Any

from card.models.architectures.architecture import PRE_NORMS, Architecture
from card.models.decoder_config import DecoderConfig


class Cohere2Fields(DecoderConfig):
    """Its config. Unless it says otherwise, three layers of four have a window."""

    model_type = "cohere2"
    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int | list[int] = 22528
    logit_scale: float = 0.0625
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    bos_token_id: int | None = 5
    eos_token_id: int | list[int] | None = 255001
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: int | None = 4096

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out; the size of a head follows from others, whatever is stated."""
        self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.give_windows(others.pop("sliding_window_pattern", 4))
        super().__post_init__(**others)


def turns(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary embeddings: those with a window do."""
    return config.sliding_window is not None and config.layer_types[layer] == "sliding_attention"


ARCHITECTURE = Architecture(
    model_class="Cohere2ForCausalLM",
    config_class=Cohere2Fields,
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    scales={"logits": "logit_scale"},
    multiplies_logits=True,
    norms={"attention_in": PRE_NORMS["attention_in"]},
    norm_eps="layer_norm_eps",
    centres=True,
    is_parallel=True,
    has_windows=True,
    turns=turns,
    turns_neighbours=True,
    gguf_name="cohere2",
)
