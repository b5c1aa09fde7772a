"""OLMoE: experts, and norms of all queries and all keys at once."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.layer_shape import ExpertRule
from card.models.parts import PRE_NORMS, WIDE_NORMS, expert_parts

ARCHITECTURE = Architecture(
    model_class="OlmoeForCausalLM",
    config=ConfigRule(older_names={"num_experts": "num_local_experts"}),
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    expert_parts=expert_parts(),
    norms={**PRE_NORMS, **WIDE_NORMS},
    experts=ExpertRule(width="intermediate_size"),
    unbuilt={"clip_qkv": "its queries, keys and values are clipped"},
    gguf=GgufMap(name="olmoe", constants={"norm_topk_prob": False}),
)
