"""dots.llm1: Qwen3's attention, and the experts of GLM-4.5."""

from dataclasses import replace
from typing import Any

from card.models.architectures.glm4_moe import ARCHITECTURE as GLM4_MOE
from card.models.architectures.glm4_moe import EXPERTS, PLAIN_SHARED_EXPERT
from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import expert_parts


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out: the last ones have a window."""
    if config.layer_types is None:
        num_layers = config.num_hidden_layers
        first = num_layers if config.sliding_window is None else config.max_window_layers or 0
        config.layer_types = ["full_attention" if idx < first else "sliding_attention" for idx in range(num_layers)]


ARCHITECTURE = replace(
    QWEN3,
    model_class="Dots1ForCausalLM",
    config=ConfigRule(older_names={"n_routed_experts": "num_local_experts"}, complete=_complete),
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    vectors=GLM4_MOE.vectors,
    has_windows=True,
    experts=EXPERTS,
    why_not=GLM4_MOE.why_not,
    gguf=GgufMap(
        name="dots1",
        expert_scale=GLM4_MOE.gguf.expert_scale,
        fields=lambda config: {"layer_types": ["full_attention"] * config["num_hidden_layers"]},
    ),
)
