"""The entries of a file's metadata: which are used, which change nothing here, and which are refused.

They are the entries that llama.cpp reads for these architectures; names here lack the architecture's prefix.
Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-arch.cpp
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from card.models.architectures.architecture import Architecture, Cap, Scale
from card.models.files.gguf.header import DamagedError, GgufError
from card.models.warn_once import warn_once


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FOLLOWED = _names(
    "context_length embedding_length block_count nextn_predict_layers feed_forward_length "
    "attention.head_count attention.head_count_kv "
    "attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.scale "
    "attention.sliding_window attention.sliding_window_pattern rope.dimension_count rope.freq_base rope.freq_base_swa "
    "rope.scaling.type rope.scaling.factor rope.scale_linear rope.scaling.original_context_length "
    "rope.scaling.attn_factor rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor "
    "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"
)
# Facts about how the model was made, and settings of what a model without experts or windows does not have.
_HARMLESS = _names(
    "vocab_size tensor_data_layout pooling_type attention.layer_norm_epsilon "
    "attention.key_length_swa attention.value_length_swa rope.dimension_count_swa "
    "rope.scaling.finetuned leading_dense_block_count interleave_moe_layer_step moe_every_n_layers "
    "expert_shared_count expert_chunk_feed_forward_length expert_group_scale experts_per_group "
    "rope.dimension_sections "  # the axes of an image's positions, which are alike in a text
    # Caps, where the architecture has none: llama.cpp writes them into any file and reads them where they apply.
    "final_logit_softcapping attn_logit_softcapping router_logit_softcapping"
)
# Settings of experts: without any they change nothing. With some the first ones are followed, and the others must have
# a value under which they change nothing.
SHARED_WIDTH, WINDOW = "expert_shared_feed_forward_length", "attention.sliding_window"
_OF_EXPERTS = _names(
    "expert_count expert_used_count expert_feed_forward_length expert_weights_norm expert_gating_func"
) | {SHARED_WIDTH}
EXPERT_SCALE = "expert_weights_scale"
_IDLE_WITH_EXPERTS: Mapping[str, tuple[object, ...]] = {
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    EXPERT_SCALE: (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
}
# The values under which an entry changes nothing; with any other the file asks for what is not built here.
_IDLE: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.key_length_mla": (0,),
    "attention.value_length_mla": (0,),
    "attention.shared_kv_layers": (0,),
    "rope.scaling.alpha": (0, 1),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "classifier.output_labels": (),
}
_SCALES: Mapping[Scale, str] = {
    "attention": "attention.scale",
    "embedding": "embedding_scale",
    "residual": "residual_scale",
    "logits": "logit_scale",
}
_CAPS: Mapping[Cap, str] = {"attention": "attn_logit_softcapping", "logits": "final_logit_softcapping"}
# Names of texts and tokens, of which some are read, and settings of other kinds of tokenizers.
_TOKENIZER = _names(
    "model pre tokens token_type token_type_count scores merges bos_token_id eos_token_id eot_token_id eom_token_id "
    "unknown_token_id seperator_token_id padding_token_id mask_token_id cls_token_id add_bos_token add_eos_token "
    "add_sep_token add_space_prefix remove_extra_whitespaces precompiled_charsmap fim_pre_token_id fim_suf_token_id "
    "fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id suffix_token_id "
    "middle_token_id normalizer.lowercase normalizer.strip_accents"
)
PERIOD, RECURRENT = "full_attention_interval", "attention.recurrent_layers"  # which layers attend, and which do not
_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_INSTEAD, _AGAIN = "use a folder saved by transformers", "copy or download it again"


class GgufFacts:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._architecture = metadata, architecture

    def optional(self, key: str, default: Any) -> Any:
        """Return an entry as it is."""
        return self._metadata.get(f"{self._architecture}.{key}", default)

    @property
    def num_layers(self) -> int:
        """Number of layers, without those behind the last one that draft (MTP). Raises: GgufError for another value."""
        stated, drafting = self.whole("block_count"), self.optional("nextn_predict_layers", 0)
        if isinstance(drafting, bool) or not isinstance(drafting, int) or not 0 <= drafting < stated:
            key = f"{self._architecture}.nextn_predict_layers"
            raise GgufError(f"cannot be used: its {key} is {str(drafting)[:40]}, of {stated} layers; {_AGAIN}")
        return stated - drafting

    def is_behind(self, tensor: str) -> bool:
        """Return whether a tensor is of a layer that drafts."""
        layer = _LAYER.match(tensor)
        return layer is not None and self.num_layers <= int(layer[1]) < self.whole("block_count")

    def of_layers(self, key: str) -> list[Any] | None:
        """Return what is stated of each layer but those that draft; None if it is stated once, or not at all.

        Raises: DamagedError if it is stated of more or fewer layers than there are.
        """
        stated, count = self.optional(key, None), self.whole("block_count")
        if not isinstance(stated, list):
            return None
        if len(stated) != count:
            raise DamagedError(f"damaged: it has {count} layers and tells {key} of {len(stated)}")
        return stated[: self.num_layers]

    def each_layer(self, key: str, *, least: int = 1) -> int | list[int]:
        """Return a whole number of at least ``least``, or a list if layers differ. Raises: GgufError."""
        stated = self.of_layers(key)
        if stated is None:
            return self._whole(key, self.optional(key, None), least)
        numbers = [self._whole(key, one, least) for one in stated]
        return numbers if len(set(numbers)) > 1 else numbers[0]

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0, which may be stated once for each layer. Raises: GgufError for others."""
        value = self.optional(key, default)
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise GgufError(f"has layers that differ in {key}, which is not known here; {_INSTEAD}")
            value = value[0]
        return self._whole(key, value)

    def _whole(self, key: str, value: object, least: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = "is missing" if value is None else f"is {str(value)[:40]}"
            raise GgufError(f"cannot be used: its {self._architecture}.{key} {what}; {_AGAIN}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float = 0.0) -> float:
        """Return a finite number above 0, and of at least ``least``. Raises: GgufError for anything else."""
        value = self.optional(key, default)
        if not isinstance(value, int | float) or not 0 < value <= np.finfo(np.float32).max or value < least:
            raise GgufError(f"cannot be used: its {self._architecture}.{key} is {str(value)[:40]}; {_AGAIN}")
        return float(str(np.float32(value)))  # the shortest number that is stored like this: 1e-06, not 9.99999e-07

    def factor(self, scale: Scale, usual: float) -> float:
        """Return a factor; ``usual`` if the file states none, or 0. Raises: GgufError if it is not a number."""
        key = _SCALES[scale]
        return self.number(key, usual) if self.optional(key, 0) != 0 else usual

    def cap(self, cap: Cap) -> float | None:
        """Return a bound; None if the file states none. Raises: GgufError if it is not a number."""
        return self.number(_CAPS[cap]) if self.optional(_CAPS[cap], 0) else None

    def check(self, path: Path, architecture: Architecture) -> None:
        """Warn of entries that are not known. Raises: GgufError for one that asks for what is not built here."""
        known = _FOLLOWED | _HARMLESS | {_SCALES[scale] for scale in architecture.scales}
        known |= {*architecture.gguf_numbers.values(), *architecture.gguf.keys}
        known |= architecture.gguf.ignored | ({PERIOD, RECURRENT} if architecture.gguf.period else set())
        idle = _IDLE
        if architecture.gguf_experts:
            of_them = {*architecture.gguf_numbers.values(), *architecture.gguf_experts.values()}
            if architecture.gguf.expert_scale is not None:
                of_them.add(EXPERT_SCALE)
            known |= of_them
            must_be_idle = _IDLE_WITH_EXPERTS.keys() - of_them
            known, idle = (known | _OF_EXPERTS) - must_be_idle, {**_IDLE, **_IDLE_WITH_EXPERTS}
        else:
            known |= (_OF_EXPERTS - {"expert_count"}) | _IDLE_WITH_EXPERTS.keys()
        begin, tokenizer = f"{self._architecture}.", "tokenizer.ggml."
        unknown = [
            key for key in self._metadata if key.startswith(tokenizer) and key[len(tokenizer) :] not in _TOKENIZER
        ]
        for key, value in self._metadata.items():
            name = key.removeprefix(begin)
            if name == key or name in known:
                continue
            if name not in idle:
                unknown.append(key)
            elif not all(one in idle[name] for one in (value if isinstance(value, list) else [value])):
                raise GgufError(f"asks for {name} {str(value)[:40]}, which is not known here; {_INSTEAD}")
        if unknown:
            warn_once(f"{path} says something of {', '.join(sorted(unknown))[:300]}, which is not known here: left out")
