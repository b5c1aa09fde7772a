"""LFM2 with experts, such as LFM2-8B-A1B: short convolutions, and experts behind a router of sigmoids."""

from dataclasses import replace

from card.models.architectures.lfm2 import ARCHITECTURE as LFM2
from card.models.architectures.lfm2 import mixed_shape
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import ExpertRule
from card.models.parts import expert_biases, expert_parts

ARCHITECTURE = replace(
    LFM2,
    model_class="Lfm2MoeForCausalLM",
    config=ConfigRule(older_names={"tie_word_embeddings": "tie_embedding"}),
    expert_parts=expert_parts("feed_forward"),
    experts=ExpertRule(
        first="num_dense_layers",
        scale="routed_scaling_factor",
        has_sigmoids=True,
        sum_offset=1e-6,
        has_biases="use_expert_bias",
    ),
    vectors=expert_biases("feed_forward.expert_bias"),
    file_names={
        rf"(\.experts\.\d+)\.{theirs}\.": rf"\1.{ours}_proj."
        for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    rotary="pos_emb",
    shapes=mixed_shape,
    gguf=replace(LFM2.gguf, name="lfm2moe", constants={}),
)
