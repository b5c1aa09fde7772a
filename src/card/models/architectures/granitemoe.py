"""Granite 3 with experts: Granite's four factors around them."""

from dataclasses import replace

from card.models.architectures.granite import ARCHITECTURE as GRANITE
from card.models.architectures.mixtral import EXPERTS
from card.models.parts import expert_parts

ARCHITECTURE = replace(
    GRANITE,
    model_class="GraniteMoeForCausalLM",
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    expert_parts=expert_parts("block_sparse_moe", "router"),
    file_names={
        r"\.block_sparse_moe\.input_linear\.weight": ".block_sparse_moe.experts.gate_up_proj",
        r"\.block_sparse_moe\.output_linear\.weight": ".block_sparse_moe.experts.down_proj",
        r"\.router\.layer\.weight": ".router.weight",
    },
    experts=EXPERTS,
    gguf=replace(GRANITE.gguf, name="granitemoe", also="granite"),
)
