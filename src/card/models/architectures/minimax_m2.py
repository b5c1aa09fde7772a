"""MiniMax-M2: experts behind a router of sigmoids, norms of all heads at once, and angles for a part of each head."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import PRE_NORMS, WIDE_NORMS, Part, chooses_by_biases
from card.models.architectures.mixtral import ARCHITECTURE as MIXTRAL
from card.models.architectures.mixtral import shape_of
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import LayerShape


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = shape_of(config, layer)
    assert shape.experts is not None
    return replace(shape, experts=replace(shape.experts, has_sigmoids=True, has_biases=True))


ARCHITECTURE = replace(
    MIXTRAL,
    model_class="MiniMaxM2ForCausalLM",
    config=ConfigRule(older_names={"num_local_experts": "num_experts"}, turned_by="rotary_dim"),
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
