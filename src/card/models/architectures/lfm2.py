"""LFM2: short convolutions with gates, and attention with norms of queries and keys in some layers."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.layer_shape import LayerShape, stated_shape
from card.models.parts import Part


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out."""
    if config.layer_types is None:
        layers = range(config.num_hidden_layers)
        config.full_attn_idxs = list(layers) if config.full_attn_idxs is None else config.full_attn_idxs
        config.layer_types = ["full_attention" if idx in config.full_attn_idxs else "conv" for idx in layers]


def mixed_shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer with an MLP of the stated width."""
    stated = stated_shape(config, layer)
    if config.layer_types[layer] == "conv":
        return replace(stated, mixer="short_conv", num_taps=config.conv_L_cache)
    return stated


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer; the stated width of the MLP may be what it was made from."""
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if config.block_ffn_dim_multiplier is not None:
            multiple = config.block_multiple_of
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // multiple) * multiple
    return replace(mixed_shape(config, layer), mlp_width=inner)


ARCHITECTURE = Architecture(
    model_class="Lfm2ForCausalLM",
    config=ConfigRule(
        older_names={"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}, complete=_complete
    ),
    linears=(
        Part("self_attn.q_proj", "attn_q", ("queries", "hidden"), mixer="attention"),
        Part("self_attn.k_proj", "attn_k", ("keys", "hidden"), mixer="attention"),
        Part("self_attn.v_proj", "attn_v", ("keys", "hidden"), mixer="attention"),
        Part("self_attn.out_proj", "attn_output", ("hidden", "queries"), mixer="attention"),
        Part("conv.in_proj", "shortconv.in_proj", ("conv_in", "hidden"), mixer="short_conv"),
        Part("conv.out_proj", "shortconv.out_proj", ("hidden", "hidden"), mixer="short_conv"),
        Part("feed_forward.w1", "ffn_gate", ("inner", "hidden")),
        Part("feed_forward.w3", "ffn_up", ("inner", "hidden")),
        Part("feed_forward.w2", "ffn_down", ("hidden", "inner")),
    ),
    norms={
        "attention_in": Part("operator_norm", "attn_norm", ("hidden",)),
        "mlp_in": Part("ffn_norm", "ffn_norm", ("hidden",)),
        "query": Part("self_attn.q_layernorm", "attn_q_norm", ("head",), mixer="attention"),
        "key": Part("self_attn.k_layernorm", "attn_k_norm", ("head",), mixer="attention"),
    },
    filters=(Part("conv.conv", "shortconv.conv", ("hidden", "one", "taps"), mixer="short_conv"),),
    mixers={"conv": "short_conv"},
    last_norm=("embedding_norm", "token_embd_norm"),
    norm_eps="norm_eps",
    activation=None,
    shapes=_shape,
    unbuilt={"conv_bias": "its convolutions have biases"},
    gguf=GgufMap(
        name="lfm2", sizes={"conv_L_cache": "shortconv.l_cache"}, constants={"block_auto_adjust_ff_dim": False}
    ),
)
