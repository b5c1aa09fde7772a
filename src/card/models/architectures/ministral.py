"""Ministral: Mistral whose layers differ in kind."""

from dataclasses import replace
from typing import Any

from card.models.architectures.mistral import ARCHITECTURE as MISTRAL
from card.models.decoder_config import ConfigRule


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out: all have a window, or none has."""
    if config.layer_types is None:
        kind = "full_attention" if config.sliding_window is None else "sliding_attention"
        config.layer_types = [kind] * config.num_hidden_layers


ARCHITECTURE = replace(MISTRAL, model_class="MinistralForCausalLM", config=ConfigRule(complete=_complete))
