"""`SamplingParams` from the fields of a request and the model's defaults."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from card.config import SamplingParams
from card.server.errors import bad_request
from card.server.sampling_fields import settings_in
from card.server.schemas import SamplingFields


def sampling_params(
    fields: SamplingFields, *, max_tokens: int | None, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Return the parameters of a request's first choice, with a fixed seed; absent fields stay unset.

    Raises: SettingsError, ApiError 400 for values out of range.
    """
    for token_id in fields.stop_token_ids:
        check_id(token_id, "stop_token_ids", vocab_size)
    asked = settings_in(fields, "completions")
    seed = fields.seed
    return SamplingParams(
        **{**asked, "seed": secrets.randbelow(2**31) if seed is None else seed & (2**63 - 1)},
        stop=fields.stop,
        stop_token_ids=fields.stop_token_ids,
        max_tokens=max_tokens,
        logit_bias=_biases(fields.logit_bias, vocab_size),
        grammar=fields.grammar(),
        logprobs=logprobs,
        speculates=fields.speculation == "on",
    )


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
