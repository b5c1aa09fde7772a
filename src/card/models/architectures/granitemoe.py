"""Granite 3 with experts: Granite's four factors around them."""

from dataclasses import replace

from card.models.architectures.architecture import expert_parts
from card.models.architectures.granite import ARCHITECTURE as GRANITE
from card.models.architectures.mixtral import GGUF_EXPERTS, shape_of
from card.models.decoder_config import DecoderConfig


class GraniteMoeFields(DecoderConfig):
    """Its config."""

    model_type = "granitemoe"
    attention_bias: bool = False
    embedding_multiplier: float | int | None = 1.0
    logits_scaling: float | int | None = 1.0
    residual_multiplier: float | int | None = 1.0
    attention_multiplier: float | int | None = 1.0
    num_local_experts: int | None = 8
    num_experts_per_tok: int | None = 2
    output_router_logits: bool | None = False
    router_aux_loss_coef: float | None = 0.001


ARCHITECTURE = replace(
    GRANITE,
    model_class="GraniteMoeForCausalLM",
    config_class=GraniteMoeFields,
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    expert_parts=expert_parts("block_sparse_moe", "router"),
    file_names={
        r"\.block_sparse_moe\.input_linear\.weight": ".block_sparse_moe.experts.gate_up_proj",
        r"\.block_sparse_moe\.output_linear\.weight": ".block_sparse_moe.experts.down_proj",
        r"\.router\.layer\.weight": ".router.weight",
    },
    shapes=shape_of,
    gguf_name="granitemoe",
    gguf_also="granite",
    gguf_experts=GGUF_EXPERTS,
)
