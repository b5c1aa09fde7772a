"""From the fields of a request and the model's defaults to `SamplingParams`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from card.config import SamplingParams
from card.server.errors import bad_request
from card.server.schemas import SamplingFields

_LEAST = 1e-6  # float32 rounds much smaller factors to 0, or what is divided by them to infinity
_AS_ASKED = {
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "shows_tree",
}
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the sampling parameters that a model's makers recommend: those in which they differ from neutral ones."""
    stated = config.to_diff_dict() if config is not None else {}
    defaults = {name: stated[name] for name in _DEFAULTED if stated.get(name) is not None}
    if stated.get("max_new_tokens") is not None:
        defaults["max_tokens"] = int(stated["max_new_tokens"])
    return defaults


def sampling_params(
    fields: SamplingFields, defaults: Mapping[str, Any], *, max_tokens: int, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Return the parameters of a request's first choice, its seed fixed.

    Raises: SettingsError, ApiError 400 for values out of range.
    """
    chosen = {name: defaults[name] for name in _DEFAULTED if name in defaults}
    chosen |= {name: value for name in _DEFAULTED if (value := getattr(fields, name)) is not None}
    for name in ("temperature", "top_p", "repetition_penalty"):
        if 0.0 < chosen.get(name, 0.0) < _LEAST:
            chosen[name] = _LEAST
    if "top_k" in chosen:
        chosen["top_k"] = max(0, chosen["top_k"])
    for token_id in fields.stop_token_ids:
        check_id(token_id, "stop_token_ids", vocab_size)
    return SamplingParams(
        **chosen,
        seed=secrets.randbelow(2**31) if fields.seed is None else fields.seed & (2**63 - 1),
        max_tokens=max_tokens,
        logit_bias=_biases(fields.logit_bias, vocab_size),
        grammar=fields.grammar(),
        logprobs=logprobs,
        speculates=fields.speculation == "on",
        **fields.model_dump(include=_AS_ASKED),
    )


def derived_seed(seed: int, choice_idx: int) -> int:
    """Return the seed of one of several choices: the first has the request's own, the others as good as new ones."""
    if choice_idx == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice_idx}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _biases(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise bad_request(f"the keys of logit_bias must be token ids, got {key[:40]!r}", "logit_bias")
        biases[int(key)] = value
        check_id(int(key), "logit_bias", vocab_size)
    return biases


def check_id(token_id: int, param: str, vocab_size: int) -> None:
    """Raise ApiError 400 unless the target has this token."""
    if not 0 <= token_id < vocab_size:
        raise bad_request(f"{param}: token ids must be from 0 to {vocab_size - 1}, got {token_id}", param)
