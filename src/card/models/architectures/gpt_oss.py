"""gpt-oss: experts with biases and a bounded gate, sinks in attention, and a window in every second layer."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.architectures.mixtral import EXPERTS
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import PRE_NORMS, NormPlace, Part, expert_parts

_ALPHA, _LIMIT = 1.702, 7.0  # of the gate, as the machine code has them


def _complete(config: Any, others: dict[str, Any]) -> None:
    """State the angles of the first models."""
    if config.rope_parameters is None:
        config.rope_parameters = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }


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
    config=ConfigRule(older_names={"num_local_experts": "num_experts"}, window_period=2, complete=_complete),
    biases={"qkv": "attention_bias", "out": "attention_bias", "experts": True},
    expert_parts=expert_parts("mlp", "router"),
    interleaves_experts=True,
    norms=_NORMS,
    vectors={"sinks": Part("self_attn.sinks", "attn_sinks.weight", ("heads",))},
    activation=None,
    clamps_gate=True,
    has_windows=True,
    experts=EXPERTS,
    gives_angles_once=True,
    why_not=why_not,
    gguf=GgufMap(name="gpt-oss", fields=gguf_fields),
)
