"""Ministral: Mistral whose layers differ in kind."""

from dataclasses import replace
from typing import Any

from card.models.architectures.mistral import ARCHITECTURE as MISTRAL
from card.models.architectures.mistral import MistralFields


class MinistralFields(MistralFields):
    """Its config. Unless it says otherwise, all layers have a window, or none has."""

    model_type = "ministral"

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        super().__post_init__(**others)


ARCHITECTURE = replace(MISTRAL, model_class="MinistralForCausalLM", config_class=MinistralFields)
