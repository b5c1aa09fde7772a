"""EXAONE 4: norms of what a block adds alone, and only layers with a window know positions where there are such."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import HEAD_NORMS, Architecture
from card.models.architectures.olmo2 import POST_NORMS
from card.models.decoder_config import DecoderConfig


class Exaone4Fields(DecoderConfig):
    """Its config. Unless it says otherwise, three layers of four have a window."""

    model_type = "exaone4"
    vocab_size: int = 102400
    intermediate_size: int | list[int] = 16384
    num_key_value_heads: int | list[int] = 32
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    sliding_window: int | None = 4096
    sliding_window_pattern: str | int | None = 4

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        if self.sliding_window is None:
            self.sliding_window_pattern = 0
        period: Any = self.sliding_window_pattern
        self.give_windows(period)
        super().__post_init__(**others)


def turns(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary embeddings."""
    return config.sliding_window is None or config.layer_types[layer] == "sliding_attention"


def gguf_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return that no layer has a window in a file that states none."""
    if "sliding_window" in config:
        return {}
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


ARCHITECTURE = Architecture(
    model_class="Exaone4ForCausalLM",
    config_class=Exaone4Fields,
    norms={**POST_NORMS, **HEAD_NORMS},
    has_windows=True,
    turns=turns,
    gguf_name="exaone4",
    gguf_fields=gguf_fields,
)
