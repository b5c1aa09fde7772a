"""Gemma 3 of text: norms of queries and keys, two kinds of angles, and five layers with a window for one without."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import HEAD_NORMS
from card.models.architectures.gemma2 import ARCHITECTURE as GEMMA2
from card.models.architectures.gemma2 import NORMS, Gemma2Fields


class Gemma3Fields(Gemma2Fields):
    """Its config. Older ones state one base of the angles for all layers without a window, and another beside it."""

    model_type = "gemma3_text"
    default_theta = {"global": 1_000_000.0, "local": 10_000.0}  # noqa: RUF012
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        self._sliding_window_pattern = others.get("sliding_window_pattern", 6)
        self.give_windows(self._sliding_window_pattern)
        super().__post_init__(**others)

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """State the angles of each kind of layer; returns what is left of the older fields."""
        return self.nest_rotations(
            others,
            {
                "full_attention": ("rope_theta", self.default_theta["global"]),
                "sliding_attention": ("rope_local_base_freq", self.default_theta["local"]),
            },
        )


ARCHITECTURE = replace(
    GEMMA2,
    model_class="Gemma3ForCausalLM",
    config_class=Gemma3Fields,
    caps={"logits": "final_logit_softcapping"},
    norms={**NORMS, **HEAD_NORMS},
    gguf_name="gemma3",
)
