"""GLM-4 (0414): norms of what a block adds too, and neighbours in the first half of each head turn together."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import LINEARS_WITH_GATE_UP, PRE_NORMS, Part

ARCHITECTURE = Architecture(
    model_class="Glm4ForCausalLM",
    config=ConfigRule(filled={"eos_token_id": [151329, 151336, 151338]}, turned_part=0.5),
    biases={"qkv": "attention_bias"},
    linears=LINEARS_WITH_GATE_UP,
    norms={
        **PRE_NORMS,
        "attention_out": Part("post_self_attn_layernorm", "post_attention_norm", ("hidden",)),
        "mlp_out": Part("post_mlp_layernorm", "post_ffw_norm", ("hidden",)),
    },
    turns_neighbours=True,
    turns_parts=True,
    gguf=GgufMap(name="glm4"),
)
