"""Qwen3-Next: what Qwen3.5 with experts has; queries, keys, values and gates of the delta rule are one layer."""

from dataclasses import replace

from card.models.architectures.qwen3_5_moe_text import ARCHITECTURE as QWEN35_MOE
from card.models.architectures.qwen3_5_moe_text import EXPERTS
from card.models.architectures.qwen3_5_text import ARCHITECTURE as QWEN35
from card.models.architectures.qwen3_5_text import DELTA_OUT, GATED_ATTENTION, INPUTS, shape_of
from card.models.parts import LINEARS, Part

_SCORES = Part("linear_attn.in_proj_ba", "ssm_ba", ("delta_scores", "hidden"), mixer="delta_rule")
_JOINED = Part("linear_attn.in_proj_qkvz", "ssm_in", ("delta_joined", "hidden"), mixer="delta_rule")
ARCHITECTURE = replace(
    QWEN35_MOE,
    model_class="Qwen3NextForCausalLM",
    config=replace(QWEN35.config, filled={"mlp_only_layers": []}),
    shapes=shape_of,
    linears=(*GATED_ATTENTION, _JOINED, _SCORES, DELTA_OUT, *LINEARS[4:]),
    experts=replace(EXPERTS, enabled="num_experts", period="decoder_sparse_step", without="mlp_only_layers"),
    gguf=replace(
        QWEN35_MOE.gguf,
        name="qwen3next",
        is_tiled=False,
        linears=(*GATED_ATTENTION, *INPUTS, _SCORES, DELTA_OUT, *LINEARS[4:]),
        constants={"norm_topk_prob": True},
    ),
)
