"""Gemma 3 of text: norms of queries and keys, two kinds of angles, and five layers with a window for one without."""

from dataclasses import replace

from card.models.architectures.gemma2 import ARCHITECTURE as GEMMA2
from card.models.architectures.gemma2 import NORMS
from card.models.decoder_config import ConfigRule
from card.models.parts import HEAD_NORMS

ARCHITECTURE = replace(
    GEMMA2,
    model_class="Gemma3ForCausalLM",
    config=ConfigRule(
        window_period=6,
        period_name="sliding_window_pattern",
        bases={"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    ),
    caps={"logits": "final_logit_softcapping"},
    norms={**NORMS, **HEAD_NORMS},
    gguf=replace(GEMMA2.gguf, name="gemma3"),
)
