"""EAGLE-3 heads as folders: which folders are some, and what their config.json says besides sizes.

Three makers write such folders: SafeAILab (`midlayer.`), SpecForge (`eagle_config`) and speculators, whose config holds
that of the layer (`transformer_layer_config`). Published configs often name a plain Llama, so tensors decide then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card.models.files.weight_files import raw_config, tensor_shapes

FC = "fc.weight"
LAYER_PREFIXES = ("midlayer.", "layers.0.")  # of the layer's tensors
STATE_NORM = "hidden_norm.weight"
_KIND, _LAYER_CONFIG, _NESTED = "speculators_model_type", "transformer_layer_config", "eagle_config"
_LAYER_IDS, _COUNTED_AS_OUTPUTS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
_SUBSET = "draft_vocab_size"
_CLASSES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Qwen3Eagle3Model", "PEagleDraftModel"})
_KINDS = ("eagle3", "peagle")
_PARALLEL, _MASK_KEYS = "parallel_drafting", ("mask_token_id", "ptd_token_id")  # of heads of several tokens a pass
_DEPTHS = ("para_depths", "num_depths")  # how many tokens these were trained for
_USUAL_TOKENS, _MOST_TOKENS = 7, 64  # of a pass: as its authors run P-EAGLE where a folder does not say, and a bound
_FLAGS = frozenset({"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"})
_HARMLESS = frozenset({"use_aux_hidden_state", "embed_requires_grad", "norm_eps"})


class FlagError(ValueError):
    """A reason why a head cannot be run as its config.json asks, in words that follow its name."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Facts of a head that its config.json states."""

    sizes: Mapping[str, Any]  # of its layer, as the config of a Llama has them
    target_layers: tuple[int, ...] | None  # as transformers' ``hidden_states`` count them; None: the usual three
    norm_before_residual: bool  # what attention adds to is the normed state
    norm_output: bool  # the state that is handed on is the normed one
    asks_input_norm: bool  # what the first linear layer reads is normed as a whole
    asks_layer_norms: bool  # or layer by layer
    num_tokens: int = 1  # that a pass drafts: the last ones of masks (P-EAGLE)
    mask_id: int | None = None  # the token of the masks


def is_eagle_folder(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head: by the keys of its config.json, or else by its tensors."""
    config = raw_config(folder)
    if not isinstance(config, dict):
        return False
    classes = config.get("architectures")
    if config.get(_KIND) in _KINDS or (isinstance(classes, list) and not _CLASSES.isdisjoint(map(str, classes))):
        return True
    try:
        names = tensor_shapes(folder)
    except (OSError, ValueError):  # a damaged file: the loader of heads, or of models, tells what is wrong
        names = None
    if names is None:
        return _SUBSET in config
    return FC in names and any(prefix + STATE_NORM in names for prefix in LAYER_PREFIXES)


def read_facts(folder: Path) -> HeadFacts:
    """Return what a folder for which `is_eagle_folder` holds says. Raises: FlagError that names a key."""
    raw: dict[str, Any] = raw_config(folder)
    nested = raw.get(_NESTED) or {}
    inner = raw.get(_LAYER_CONFIG) or raw
    if not isinstance(nested, dict) or not isinstance(inner, dict):
        raise FlagError(f"its {_NESTED if not isinstance(nested, dict) else _LAYER_CONFIG} is no object")
    stated = {**raw, **nested}
    num_tokens, mask_id = _masks(stated)
    for name, value in stated.items():
        is_known = name in _FLAGS | _HARMLESS | {_LAYER_IDS}
        asks = name in nested or name.startswith(("norm_", "fc_", "embed_"))
        if asks and not is_known and value not in (None, False, [], {}):
            raise FlagError(f"its {name} is {str(value)[:40]}, which is not known here")
        if name in _FLAGS and not isinstance(value, bool | None):
            raise FlagError(f"its {name} is {str(value)[:40]}, it must be true or false")
    is_speculators = _KIND in raw
    return HeadFacts(
        sizes={**inner, "name_or_path": str(folder)},
        target_layers=_layers(stated, is_output=not is_speculators),
        norm_before_residual=bool(stated.get("norm_before_residual", is_speculators)),
        norm_output=bool(stated.get("norm_output")),
        asks_input_norm=bool(stated.get("norm_before_fc")),
        asks_layer_norms=bool(stated.get("fc_norm")),
        num_tokens=num_tokens,
        mask_id=mask_id,
    )


def stated_config(sizes: Mapping[str, Any], target_layers: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Return the config.json of a head of so many tokens as SpecForge writes it; arguments as of `HeadFacts`."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **sizes,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        _SUBSET: num_tokens,
        _NESTED: {"use_aux_hidden_state": True, _LAYER_IDS: [one - 1 for one in target_layers]},
    }


def _masks(stated: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return how many tokens a pass drafts, and the token of the masks. Raises: FlagError that names a key."""
    mask_id = next((stated[name] for name in _MASK_KEYS if stated.get(name) is not None), None)
    if stated.get(_KIND) != _KINDS[1] and not stated.get(_PARALLEL) and mask_id is None:
        return 1, None
    if type(mask_id) is not int:
        raise FlagError(f"it drafts several tokens a pass, and its {_MASK_KEYS[0]} is {str(mask_id)[:40]}, no token")
    count = next((stated[name] for name in _DEPTHS if stated.get(name) is not None), _USUAL_TOKENS)
    if type(count) is not int or not 1 <= count <= _MOST_TOKENS:
        raise FlagError(f"it drafts {str(count)[:40]} tokens a pass, it must be 1 to {_MOST_TOKENS}")
    return count, mask_id


def counted_layers(ids: Sequence[int], *, is_output: bool) -> tuple[int, ...]:
    """Return layers as transformers' ``hidden_states`` count them.

    Two countings circulate, and some files have the other one than their maker's. The usual first layer tells them
    apart: 1 counts by what layers give, 2 by what they read.

    Args:
        is_output: the format counts by what layers give.
    """
    if ids[0] in (1, 2):
        is_output = ids[0] == 1
    return tuple(one + is_output for one in ids)


def _layers(stated: Mapping[str, Any], *, is_output: bool) -> tuple[int, ...] | None:
    """Return the layers that a config states; None if it states none."""
    name = _LAYER_IDS if stated.get(_LAYER_IDS) is not None else _COUNTED_AS_OUTPUTS
    ids = stated.get(name)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise FlagError(f"its {name} is {str(ids)[:40]}, it must be a list of numbers of layers")
    return counted_layers(ids, is_output=is_output)
