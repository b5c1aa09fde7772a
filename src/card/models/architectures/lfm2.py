"""LFM2: short convolutions with gates, and attention with norms of queries and keys in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from card.models.architectures.architecture import Architecture, Part
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import LayerShape, stated_shape


class ShortConvFields(DecoderConfig):
    """The config of LFM2 with experts or without."""

    default_theta = 1_000_000.0
    vocab_size: int = 65536
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128_000
    norm_eps: float = 0.00001
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 3  # taps

    def __post_init__(self, **others: Any) -> None:
        """Read the older name of a field."""
        self.tie_word_embeddings = others.pop("tie_embedding", self.tie_word_embeddings)
        super().__post_init__(**others)


class Lfm2Fields(ShortConvFields):
    """Its config."""

    model_type = "lfm2"
    older_names: ClassVar[Mapping[str, str]] = {"intermediate_size": "block_ff_dim"}
    hidden_size: int = 2560
    intermediate_size: int = 12288
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float | int | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out, and read the older name of a field."""
        if self.layer_types is None:
            layers = range(self.num_hidden_layers)
            self.full_attn_idxs = list(layers) if self.full_attn_idxs is None else self.full_attn_idxs
            self.layer_types = ["full_attention" if idx in self.full_attn_idxs else "conv" for idx in layers]
        self.intermediate_size = others.pop(self.older_names["intermediate_size"], self.intermediate_size)
        super().__post_init__(**others)


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


def why_not(config: Any) -> str | None:
    """Return why a config asks for more than is built here; None if it does not."""
    return "its convolutions have biases (conv_bias)" if config.conv_bias else None


def _gguf_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"block_auto_adjust_ff_dim": False}  # files state the width that it has


ARCHITECTURE = Architecture(
    model_class="Lfm2ForCausalLM",
    config_class=Lfm2Fields,
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
    why_not=why_not,
    turns=lambda config, layer: config.layer_types[layer] != "conv",
    gguf_name="lfm2",
    gguf_sizes={"conv_L_cache": "shortconv.l_cache"},
    gguf_fields=_gguf_fields,
)
