"""The parts of a decoder's layer: linear layers, norms and vectors, by transformers' names and llama.cpp's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from card.models.layer_shape import LayerShape, Mixer

Size = Literal[
    "hidden", "inner", "queries", "keys", "head", "heads", "qkv", "gate_up", "conv_in", "taps", "experts", "expert",
    "shared", "shared_both", "one", "layer_input", "gated_queries", "delta_in", "delta_values", "delta_heads",
    "delta_value", "delta_joined", "delta_scores"
]  # fmt: skip
Biased = Literal["qkv", "out", "mlp", "experts"]
# Norms: of a block's input and output, of each head's queries and keys, of the output of the delta rule's heads, of
# what a token's own numbers add; and beside an MLP, of the experts' input, and of the outputs of MLP and experts.
NormPlace = Literal[
    "attention_in", "attention_out", "mlp_in", "mlp_out", "query", "key", "delta_out", "input_out", "mlp_alone",
    "experts_in", "experts_out",
]  # fmt: skip
# The router; the linear layers of each expert; those of the shared expert, whose gate and up may be one layer; and the
# score that weighs the shared expert's output.
ExpertPlace = Literal[
    "router", "gate", "up", "down", "shared_gate", "shared_up", "shared_both", "shared_down", "shared_score"
]  # fmt: skip
# Factors: of a layer's hidden states, of the router's input, of each expert's weight. Biases of the experts' scores,
# for the choice alone. Logarithms of decay rates, and biases of the scores of a step. Attention sinks: a score of each
# query head that takes part in the softmax and has no value.
VectorPlace = Literal["layer", "router", "experts", "expert_biases", "rates", "step_biases", "sinks"]

# What makes a gate of hidden states for a token's own numbers, and what those behind it give.
InputPlace = Literal["gate", "out"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer: a linear layer, or a norm."""

    name: str  # transformers'
    gguf_name: str  # llama.cpp's; of a vector the whole name of the tensor
    shape: tuple[Size, ...]  # of its weight: [out, in], [channels] of a norm
    bias: Biased | None = None  # which entry of `Architecture.biases` says whether it has one
    mixer: Mixer | None = None  # of the layers that have it; None: all
    only: Callable[[LayerShape], bool] | None = None  # which of these layers have it; None: all

    def is_in(self, shape: LayerShape) -> bool:
        """Return whether a layer of this shape has it."""
        return self.mixer in (None, shape.mixer) and (self.only is None or self.only(shape))

    def of_each(self, count: int) -> "list[Part]":
        """Return the parts of so many experts, whose number stands in the name; this one if there is none in it."""
        if "{}" not in self.name:
            return [self]
        return [replace(self, name=self.name.format(expert)) for expert in range(count)]


LINEARS = (
    Part("self_attn.q_proj", "attn_q", ("queries", "hidden"), "qkv"),
    Part("self_attn.k_proj", "attn_k", ("keys", "hidden"), "qkv"),
    Part("self_attn.v_proj", "attn_v", ("keys", "hidden"), "qkv"),
    Part("self_attn.o_proj", "attn_output", ("hidden", "queries"), "out"),
    Part("mlp.gate_proj", "ffn_gate", ("inner", "hidden"), "mlp"),
    Part("mlp.up_proj", "ffn_up", ("inner", "hidden"), "mlp"),
    Part("mlp.down_proj", "ffn_down", ("hidden", "inner"), "mlp"),
)
# Queries, keys and values stored as one, and gate and up.
_QKV = Part("self_attn.qkv_proj", "attn_qkv", ("qkv", "hidden"), "qkv")
_GATE_UP = Part("mlp.gate_up_proj", "ffn_up", ("gate_up", "hidden"), "mlp")
LINEARS_WITH_GATE_UP = (*LINEARS[:4], _GATE_UP, LINEARS[6])
LINEARS_WITH_QKV_AND_GATE_UP = (_QKV, LINEARS[3], _GATE_UP, LINEARS[6])
SPLITS: Mapping[Size, tuple[Size, ...]] = {
    "qkv": ("queries", "keys", "keys"),
    "gate_up": ("inner", "inner"),
    "shared_both": ("shared", "shared"),
    "conv_in": ("hidden", "hidden", "hidden"),
    "gated_queries": ("queries", "queries"),
    "delta_joined": ("delta_in", "delta_values"),
    "delta_scores": ("delta_heads", "delta_heads"),
}
PRE_NORMS: Mapping[NormPlace, Part] = {
    "attention_in": Part("input_layernorm", "attn_norm", ("hidden",)),
    "mlp_in": Part("post_attention_layernorm", "ffn_norm", ("hidden",)),
}
HEAD_NORMS: Mapping[NormPlace, Part] = {
    "query": Part("self_attn.q_norm", "attn_q_norm", ("head",)),
    "key": Part("self_attn.k_norm", "attn_k_norm", ("head",)),
}
WIDE_NORMS: Mapping[NormPlace, Part] = {
    "query": Part("self_attn.q_norm", "attn_q_norm", ("queries",)),
    "key": Part("self_attn.k_norm", "attn_k_norm", ("keys",)),
}


def expert_parts(block: str = "mlp", router: str = "gate") -> dict[ExpertPlace, Part]:
    """Return the parts of experts; the file that transformers reads names them so, or `Architecture.file_names` does.

    Args:
        block: transformers' name of what holds them.
        router: that of the router in it.
    """
    return {
        "router": Part(f"{block}.{router}", "ffn_gate_inp", ("experts", "hidden"), "experts"),
        "gate": Part(f"{block}.experts.{{}}.gate_proj", "ffn_gate_exps", ("expert", "hidden"), "experts"),
        "up": Part(f"{block}.experts.{{}}.up_proj", "ffn_up_exps", ("expert", "hidden"), "experts"),
        "down": Part(f"{block}.experts.{{}}.down_proj", "ffn_down_exps", ("hidden", "expert"), "experts"),
    }


def has_shared_expert(shape: LayerShape) -> bool:
    """Return whether a layer has an expert that all rows take."""
    return shape.experts is not None and shape.experts.shared_width > 0


def expert_biases(name: str, *shape: Size) -> dict[VectorPlace, Part]:
    """Return the vector that is added to scores for the choice of experts, by transformers' name of it."""
    return {"expert_biases": Part(name, "exp_probs_b.bias", shape or ("experts",), only=_chooses_by_biases)}


def _chooses_by_biases(shape: LayerShape) -> bool:
    return shape.experts is not None and shape.experts.has_biases
