"""SmolLM3: Llama with layers that know no positions."""

from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write out which layers turn (1) and the kind of each layer."""
    if config.no_rope_layers is None:
        layers = range(1, config.num_hidden_layers + 1)
        config.no_rope_layers = [int(layer % config.no_rope_layer_interval != 0) for layer in layers]
    if config.layer_types is None:
        has_windows = config.use_sliding_window and config.sliding_window is not None
        config.layer_types = [
            "sliding_attention" if has_windows and not turns else "full_attention" for turns in config.no_rope_layers
        ]


def turns(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary embeddings."""
    return bool(config.no_rope_layers[layer])


ARCHITECTURE = Architecture(
    model_class="SmolLM3ForCausalLM",
    config=ConfigRule(complete=_complete),
    biases={"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"},
    has_windows=True,
    turns=turns,
    gguf=GgufMap(name="smollm3", pairs=True),
)
