"""OLMo 3: OLMo 2 with a window in three layers of four, and angles by kind of layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.kernels.rotation import LEAST_SETTING
from card.models.architectures.olmo2 import ARCHITECTURE as OLMO2
from card.models.decoder_config import ConfigRule


def _gguf_layers(facts: Any, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the angles of each kind of layer; those with a window have a base of their own, or the same."""
    rope = config["rope_parameters"]
    theta = facts.number("rope.freq_base_swa", rope["rope_theta"], least=LEAST_SETTING)
    windowed = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": windowed}}


ARCHITECTURE = replace(
    OLMO2,
    model_class="Olmo3ForCausalLM",
    config=ConfigRule(window_period=4, bases=dict.fromkeys(("full_attention", "sliding_attention"), "rope_theta")),
    has_windows=True,
    gguf=replace(OLMO2.gguf, layers=_gguf_layers),
)
