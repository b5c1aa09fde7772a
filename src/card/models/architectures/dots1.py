"""dots.llm1: Qwen3's attention, and the experts of GLM-4.5."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import PLAIN_SHARED_EXPERT, expert_parts
from card.models.architectures.glm4_moe import ARCHITECTURE as GLM4_MOE
from card.models.architectures.glm4_moe import shape_of
from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.decoder_config import DecoderConfig


class Dots1Fields(DecoderConfig):
    """Its config, with the kind of each layer written out, and two names for the number of experts."""

    model_type = "dots1"
    vocab_size: int = 152064
    hidden_size: int = 4608
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 62
    num_key_value_heads: int | None = 32
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    output_router_logits: bool = False
    n_group: int | None = 1
    topk_group: int | None = 1
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int | None = 0
    norm_topk_prob: bool | None = False
    attention_bias: bool = False
    routed_scaling_factor: float = 1.0
    sliding_window: int | None = 4096
    max_window_layers: int | None = 62
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        self.n_routed_experts = others.pop("num_local_experts", self.n_routed_experts)
        if self.layer_types is None:
            first = self.num_hidden_layers if self.sliding_window is None else self.max_window_layers or 0
            self.layer_types = [
                "full_attention" if layer < first else "sliding_attention" for layer in range(self.num_hidden_layers)
            ]
        super().__post_init__(**others)


ARCHITECTURE = replace(
    QWEN3,
    model_class="Dots1ForCausalLM",
    config_class=Dots1Fields,
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    vectors=GLM4_MOE.vectors,
    has_windows=True,
    shapes=shape_of,
    why_not=GLM4_MOE.why_not,
    gguf_name="dots1",
    gguf_also=None,
    gguf_ignored=frozenset(),
    gguf_has_sigmoids=True,
    gguf_experts=GLM4_MOE.gguf_experts,
    gguf_expert_scale=GLM4_MOE.gguf_expert_scale,
    gguf_sizes=GLM4_MOE.gguf_sizes,
    gguf_fields=lambda config: {"layer_types": ["full_attention"] * config["num_hidden_layers"]},
)
