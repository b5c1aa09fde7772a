"""OLMo 3: OLMo 2 with a window in three layers of four, and angles by kind of layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.kernels.rotation import LEAST_SETTING
from card.models.architectures.olmo2 import ARCHITECTURE as OLMO2
from card.models.architectures.olmo2 import Olmo2Fields


class Olmo3Fields(Olmo2Fields):
    """Its config. The base of the angles is stated for layers without a window, as is their scaling."""

    model_type = "olmo3"
    default_theta = 500000.0
    sliding_window: int | None = 4096

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        self.give_windows(4)
        super().__post_init__(**others)

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """State the angles of each kind of layer; returns what is left of the older fields."""
        bases = dict.fromkeys(("full_attention", "sliding_attention"), ("rope_theta", self.default_theta))
        return self.nest_rotations(others, bases)


def _gguf_layers(facts: Any, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the angles of each kind of layer; those with a window have a base of their own, or the same."""
    rope = config["rope_parameters"]
    theta = facts.number("rope.freq_base_swa", rope["rope_theta"], least=LEAST_SETTING)
    windowed = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": windowed}}


ARCHITECTURE = replace(
    OLMO2, model_class="Olmo3ForCausalLM", config_class=Olmo3Fields, has_windows=True, gguf_layers=_gguf_layers
)
