"""MiniMax-M2: experts behind a router of sigmoids, norms of all heads at once, and angles for a part of each head."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import PRE_NORMS, WIDE_NORMS, Part, chooses_by_biases
from card.models.architectures.mixtral import ARCHITECTURE as MIXTRAL
from card.models.architectures.mixtral import shape_of
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import LayerShape


class MiniMaxM2Fields(DecoderConfig):
    """Its config, with two names for the number of experts. Published ones state how many channels of a head turn."""

    model_type = "minimax_m2"
    default_theta = 5_000_000.0
    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 196608
    bos_token_id: int | None = 200034
    eos_token_id: int | list[int] | None = 200020
    num_experts_per_tok: int = 8
    num_local_experts: int = 256
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0

    def __post_init__(self, **others: Any) -> None:
        """Take the number of experts under its other name."""
        self.num_local_experts = others.pop("num_experts", self.num_local_experts)
        super().__post_init__(**others)

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """State which part of a head turns; returns what is left of the older fields."""
        if (turned := others.get("rotary_dim")) is not None:
            others.setdefault("partial_rotary_factor", turned / self.head_dim)
        return super().convert_rope_params_to_dict(**others)


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = shape_of(config, layer)
    assert shape.experts is not None
    return replace(shape, experts=replace(shape.experts, has_sigmoids=True, has_biases=True))


ARCHITECTURE = replace(
    MIXTRAL,
    model_class="MiniMaxM2ForCausalLM",
    config_class=MiniMaxM2Fields,
    norms={**PRE_NORMS, **WIDE_NORMS},
    vectors={
        "expert_biases": Part("mlp.e_score_correction_bias", "exp_probs_b.bias", ("experts",), only=chooses_by_biases)
    },
    has_windows=False,
    shapes=_shape,
    turns_parts=True,
    gguf_name="minimax-m2",
    gguf_pairs=False,
    gguf_has_sigmoids=True,
)
