"""gpt-oss: experts with biases and a bounded gate, sinks in attention, and a window in every second layer."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import PRE_NORMS, Architecture, NormPlace, Part, expert_parts
from card.models.architectures.mixtral import GGUF_EXPERTS, shape_of
from card.models.decoder_config import RoutedConfig

_ALPHA, _LIMIT = 1.702, 7.0  # of the gate, as the machine code has them


class GptOssFields(RoutedConfig):
    """Its config; the first layer has a window, the second one not, and so on."""

    model_type = "gpt_oss"
    default_theta = 150_000.0
    num_hidden_layers: int = 36
    num_local_experts: int = 128
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    head_dim: int = 64
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 4
    swiglu_alpha: float | int = _ALPHA
    swiglu_limit: float | int = _LIMIT
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    attention_bias: bool = True

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out, and take the number of experts under its other name."""
        self.num_local_experts = others.pop("num_experts", self.num_local_experts)
        self.give_windows(2)
        if self.rope_parameters is None:
            self.rope_parameters = {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        super().__post_init__(**others)


def why_not(config: Any) -> str | None:
    """Return why a config asks for more than is built here; None if it does not."""
    if (config.swiglu_alpha, config.swiglu_limit) == (_ALPHA, _LIMIT):
        return None
    return (
        f"its gate has swiglu_alpha {config.swiglu_alpha} and swiglu_limit {config.swiglu_limit}, and here they are "
        f"{_ALPHA} and {_LIMIT}"
    )


def gguf_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what files do not state: where yarn begins and ends is not rounded to whole channels."""
    rope = config["rope_parameters"]
    return {"rope_parameters": {**rope, "truncate": False}} if rope["rope_type"] == "yarn" else {}


_NORMS: Mapping[NormPlace, Part] = {
    **PRE_NORMS,
    "mlp_in": Part("post_attention_layernorm", "post_attention_norm", ("hidden",)),
}
ARCHITECTURE = Architecture(
    model_class="GptOssForCausalLM",
    config_class=GptOssFields,
    biases={"qkv": "attention_bias", "out": "attention_bias", "experts": True},
    expert_parts=expert_parts("mlp", "router"),
    interleaves_experts=True,
    norms=_NORMS,
    vectors={"sinks": Part("self_attn.sinks", "attn_sinks.weight", ("heads",))},
    activation=None,
    clamps_gate=True,
    has_windows=True,
    shapes=shape_of,
    gives_angles_once=True,
    gguf_name="gpt-oss",
    gguf_fields=gguf_fields,
    gguf_experts=GGUF_EXPERTS,
    why_not=why_not,
)
