"""MiniMax-M2: experts behind a router of sigmoids, norms of all heads at once, and angles for a part of each head."""

from dataclasses import replace

from card.models.architectures.mixtral import ARCHITECTURE as MIXTRAL
from card.models.architectures.mixtral import EXPERTS
from card.models.decoder_config import ConfigRule
from card.models.parts import PRE_NORMS, WIDE_NORMS, expert_biases

ARCHITECTURE = replace(
    MIXTRAL,
    model_class="MiniMaxM2ForCausalLM",
    config=ConfigRule(older_names={"num_local_experts": "num_experts"}, turned_by="rotary_dim"),
    norms={**PRE_NORMS, **WIDE_NORMS},
    experts=replace(EXPERTS, has_sigmoids=True, has_biases=True),
    vectors=expert_biases("mlp.e_score_correction_bias"),
    has_windows=False,
    turns_parts=True,
    gguf=replace(MIXTRAL.gguf, name="minimax-m2", pairs=False),
)
