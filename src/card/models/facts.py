"""Facts of a loaded model that its configs state: sizes, the longest text, the ids that end one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from card.config import NEUTRAL
from card.errors import ModelError
from card.models.own.block_layers import BlockEmbedding, BlockLinear
from card.text.prompts import turn_end_id
from card.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel

_NO_CONTEXT_LIMIT = 1 << 30


def parameter_count(model: torch.nn.Module) -> int:
    """Return the number of parameters; a tensor used twice (tied embeddings) counts once."""
    blocks = (module.num_weights for module in model.modules() if isinstance(module, BlockLinear | BlockEmbedding))
    return sum(parameter.numel() for parameter in model.parameters()) + sum(blocks)


def vocab_size(model: LoadedModel) -> int:
    """Return V, the number of token ids that the model has logits for; padding rows included."""
    return int(model.config.get_text_config().vocab_size)


def context_limit(model: LoadedModel) -> int:
    """Return the most positions that the model was made for; a large number if its config sets no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else _NO_CONTEXT_LIMIT


def end_token_ids(model: LoadedModel, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Return the ids that end a text.

    They are those of the generation config alone, as in transformers' ``generate``; if it states none, those of the
    config; if there are none either, that of the tokenizer. The token that closes an answer in the tokenizer's chat
    template is always one of them: some makers forget it, and their chats would not end.
    """
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        model.config.get_text_config().eos_token_id,
        getattr(tokenizer, "eos_token_id", None),
    ]
    of_text = next((_ids(one) for one in stated if _ids(one)), [])
    of_turn = None if tokenizer is None else turn_end_id(tokenizer)
    ids = {*of_text, *_ids(of_turn)}
    return frozenset(one for one in ids if 0 <= one < vocab_size(model))


def _ids(stated: int | Sequence[int] | None) -> list[int]:
    if stated is None:
        return []
    return [stated] if isinstance(stated, int) else list(stated)


def sampling_defaults(model: LoadedModel) -> dict[str, Any]:
    """Return what the generation config of a model says of sampling, as `SamplingParams.resolved` takes it.

    As in transformers ``do_sample`` decides: false takes the most likely token, true without a temperature means 1.
    """
    config = model.generation_config
    stated = {} if config is None else config.to_diff_dict()
    found = {name: stated[name] for name in NEUTRAL if stated.get(name) is not None}
    if stated.get("do_sample") is not None:
        found["temperature"] = found.get("temperature", 1.0) if stated["do_sample"] else 0.0
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    if stated.get("max_new_tokens") is not None:
        found["max_tokens"] = stated["max_new_tokens"]
    return found


def check_facts(name: str, model: LoadedModel) -> None:
    """Check what is read from the configs later on. Raises: ModelError that names the file and the field."""
    config, generation = model.config.get_text_config(), model.generation_config
    for file, of, field, is_allowed, allowed in (
        ("config.json", config, "vocab_size", _is_count, "a number above 0"),
        ("config.json", config, "max_position_embeddings", _is_count, "a number above 0"),
        ("config.json", config, "eos_token_id", _is_ids, "a token id or a list of token ids"),
        ("generation_config.json", generation, "eos_token_id", _is_ids, "a token id or a list of token ids"),
        ("generation_config.json", generation, "max_new_tokens", _is_count, "a number above 0"),
        *(("generation_config.json", generation, one, _is_number, "a number") for one in NEUTRAL),
    ):
        value = getattr(of, field, None)
        if value is not None and not is_allowed(value):
            raise ModelError(
                f"{file} of {name} cannot be used: its {field} is {str(value)[:40]}, it must be {allowed}; "
                "copy or download it again"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_ids(value: Any) -> bool:
    ids = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, int) and not isinstance(one, bool) for one in ids)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
