"""Qwen3-Next: what Qwen3.5 with experts has; queries, keys, values and gates of the delta rule are one layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from card.models.architectures.architecture import LINEARS, Part
from card.models.architectures.qwen3_5_moe_text import ARCHITECTURE as QWEN35_MOE
from card.models.architectures.qwen3_5_moe_text import Qwen35MoeFields, routed_shape
from card.models.architectures.qwen3_5_text import DELTA_OUT, GATED_ATTENTION, INPUTS, mixed_shape
from card.models.architectures.qwen3_moe import has_experts
from card.models.layer_shape import LayerShape


class Qwen3NextFields(Qwen35MoeFields):
    """Its config."""

    model_type = "qwen3_next"
    older_names: ClassVar[Mapping[str, str]] = {}
    vocab_size: int = 151936
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    decoder_sparse_step: int = 1
    norm_topk_prob: bool = True
    num_experts_per_tok: int = 10
    num_experts: int = 512
    mlp_only_layers: list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        self.mlp_only_layers = self.mlp_only_layers or []
        super().__post_init__(**others)


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    if not has_experts(config, layer):
        return mixed_shape(config, layer, config.intermediate_size)
    return routed_shape(config, layer)


_SCORES = Part("linear_attn.in_proj_ba", "ssm_ba", ("delta_scores", "hidden"), mixer="delta_rule")
_JOINED = Part("linear_attn.in_proj_qkvz", "ssm_in", ("delta_joined", "hidden"), mixer="delta_rule")
ARCHITECTURE = replace(
    QWEN35_MOE,
    model_class="Qwen3NextForCausalLM",
    config_class=Qwen3NextFields,
    linears=(*GATED_ATTENTION, _JOINED, _SCORES, DELTA_OUT, *LINEARS[4:]),
    shapes=_shape,
    gguf_name="qwen3next",
    gguf_is_tiled=False,
    gguf_linears=(*GATED_ATTENTION, *INPUTS, _SCORES, DELTA_OUT, *LINEARS[4:]),
    gguf_fields=lambda config: {**QWEN35_MOE.gguf_fields(config), "norm_topk_prob": True},
)
