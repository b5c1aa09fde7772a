"""Gemma 3 of text: norms of queries and keys, two kinds of angles, and five layers with a window for one without."""

from dataclasses import replace
from typing import Any

from huggingface_hub.dataclasses import strict

from card.models.architectures.architecture import HEAD_NORMS
from card.models.architectures.gemma2 import ARCHITECTURE as GEMMA2
from card.models.architectures.gemma2 import NORMS, Gemma2Fields

_KINDS = {"full_attention": ("global", "rope_theta"), "sliding_attention": ("local", "rope_local_base_freq")}


@strict
class Gemma3Fields(Gemma2Fields):
    """Its config. Older ones state one base of the angles for all layers without a window, and another beside it."""

    model_type = "gemma3_text"
    default_theta = {"global": 1_000_000.0, "local": 10_000.0}  # type: ignore[assignment]  # noqa: RUF012
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        self._sliding_window_pattern = others.get("sliding_window_pattern", 6)
        if self.layer_types is None:
            self.layer_types = [
                "sliding_attention" if (layer + 1) % self._sliding_window_pattern else "full_attention"
                for layer in range(self.num_hidden_layers)
            ]
        super().__post_init__(**others)

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """State the angles of each kind of layer; returns what is left of the older fields."""
        scaling, stated = others.pop("rope_scaling", None), self.rope_parameters
        nested = {kind: dict((stated or {}).get(kind) or {"rope_type": "default"}) for kind in _KINDS}
        if scaling is not None:
            nested["full_attention"].update(scaling)
        for kind, (default, older) in _KINDS.items():
            nested[kind].setdefault("rope_theta", others.pop(older, self.default_theta[default]))
        self.rope_parameters = nested
        self.standardize_rope_params()
        return others


ARCHITECTURE = replace(
    GEMMA2,
    model_class="Gemma3ForCausalLM",
    config_class=Gemma3Fields,
    caps={"logits": "final_logit_softcapping"},
    norms={**NORMS, **HEAD_NORMS},
    gguf_name="gemma3",
)
