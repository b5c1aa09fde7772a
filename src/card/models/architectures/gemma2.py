"""Gemma 2: norms of what a block adds too, caps, and a window in every other layer."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.layer_shape import of_layer
from card.models.parts import NormPlace, Part

NORMS: Mapping[NormPlace, Part] = {
    "attention_in": Part("input_layernorm", "attn_norm", ("hidden",)),
    "attention_out": Part("post_attention_layernorm", "post_attention_norm", ("hidden",)),
    "mlp_in": Part("pre_feedforward_layernorm", "ffn_norm", ("hidden",)),
    "mlp_out": Part("post_feedforward_layernorm", "post_ffw_norm", ("hidden",)),
}


def query_scale(config: Any) -> float:
    """Return the factor of the scores."""
    return float(config.query_pre_attn_scalar**-0.5)


def embedding_scale(config: Any) -> float:
    """Return the factor of the embeddings."""
    return float(config.hidden_size**0.5)


_LAYERS_OF_27B = (46, 62)  # of Gemma 2 and 3: the models whose scores have a scale of their own


def gguf_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the scores are scaled by."""
    if config["num_hidden_layers"] in _LAYERS_OF_27B:
        return {"query_pre_attn_scalar": config["hidden_size"] // of_layer(config["num_attention_heads"], 0)}
    return {"query_pre_attn_scalar": config["head_dim"]}


ARCHITECTURE = Architecture(
    model_class="Gemma2ForCausalLM",
    config=ConfigRule(window_period=2),
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    scales={"attention": query_scale, "embedding": embedding_scale},
    caps={"attention": "attn_logit_softcapping", "logits": "final_logit_softcapping"},
    norms=NORMS,
    norm_offset=1.0,
    activation="hidden_activation",
    has_windows=True,
    gguf=GgufMap(name="gemma2", fields=gguf_fields),
)
