"""Cohere 2 (Command R7B, Command A): attention and the MLP read the same rows, and norms subtract the mean."""

from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import PRE_NORMS


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out; the size of a head follows from others, whatever is stated."""
    config.head_dim = config.hidden_size // config.num_attention_heads
    if config.layer_types is None:
        config.give_windows(others.pop("sliding_window_pattern", 4))


def turns(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary embeddings: those with a window do."""
    return config.sliding_window is not None and config.layer_types[layer] == "sliding_attention"


ARCHITECTURE = Architecture(
    model_class="Cohere2ForCausalLM",
    config=ConfigRule(complete=_complete),
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
    gguf=GgufMap(name="cohere2"),
)
