"""OLMo 2: norms of what a block adds alone, and of all queries and all keys at once."""

from collections.abc import Mapping

from card.models.architectures.architecture import Architecture
from card.models.gguf_map import GgufMap
from card.models.parts import WIDE_NORMS, NormPlace, Part

POST_NORMS: Mapping[NormPlace, Part] = {
    "attention_out": Part("post_attention_layernorm", "post_attention_norm", ("hidden",)),
    "mlp_out": Part("post_feedforward_layernorm", "post_ffw_norm", ("hidden",)),
}
ARCHITECTURE = Architecture(
    model_class="Olmo2ForCausalLM",
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    norms={**POST_NORMS, **WIDE_NORMS},
    gguf=GgufMap(name="olmo2"),
)
