"""Are two texts the same, token for token, and if not, was the first difference a near-tie?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from card import SamplingParams
from card.sampling import GumbelNoise

# In 16-bit dtypes a first difference is a near-tie if the gap is at most so many spacings of the larger logit: the
# distance by which two orders of summation may part.
_NEAR_TIE_SPACINGS = 2.0

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text leaves plain decoding's for the first time."""

    prompt: int
    position: int  # counted from the first new token
    token_id: int | None  # None: this text ends there
    plain_token_id: int | None  # None: plain decoding's text ends there
    logit_gap: float | None  # between the two tokens, of the target run plainly on the common text
    is_near_tie: bool

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class TextJudge:
    """Compares texts with plain decoding's and looks at the target's logits where they part."""

    def __init__(self, target: PreTrainedModel, params: SamplingParams) -> None:
        """Take the target and what the texts were decoded with."""
        self._target = target
        self._temperature = params.temperature
        self._seed = params.seed or 0
        self._gaps: dict[tuple[tuple[int, ...], int, int], tuple[float, bool]] = {}  # each difference is looked at once

    def first_differences(
        self, prompts: Sequence[Sequence[int]], pairs: Sequence[tuple[int, TokenIds, TokenIds]]
    ) -> list[Difference]:
        """Return each distinct first difference once.

        Args:
            prompts: token ids of all prompts.
            pairs: index of the prompt, the text in question, and plain decoding's.
        """
        found: dict[tuple[int, int, int | None, int | None], Difference] = {}
        for prompt_idx, ids, plain in pairs:
            if ids == plain:
                continue
            position = next(
                (i for i, (a, b) in enumerate(zip(ids, plain, strict=False)) if a != b), min(len(ids), len(plain))
            )
            own = ids[position] if position < len(ids) else None
            other = plain[position] if position < len(plain) else None
            key = prompt_idx, position, own, other
            if key not in found:
                gap, is_near_tie = None, False
                if own is not None and other is not None:
                    gap, is_near_tie = self._gap([*prompts[prompt_idx], *plain[:position]], own, other)
                found[key] = Difference(*key, gap, is_near_tie)
        return list(found.values())

    def _gap(self, text_ids: list[int], own: int, other: int) -> tuple[float, bool]:
        """Return the gap between two tokens after a text, and whether rounding may bridge it."""
        key = tuple(text_ids), own, other
        if key not in self._gaps:
            self._gaps[key] = self._measured_gap(text_ids, own, other)
        return self._gaps[key]

    def _measured_gap(self, text_ids: list[int], own: int, other: int) -> tuple[float, bool]:
        with torch.inference_mode():
            logits: Tensor = self._target(input_ids=torch.tensor([text_ids])).logits[0, -1]
        scores = logits.double()
        if self._temperature > 0:  # what is compared there: logits and noise, in units of logits
            noise = GumbelNoise(self._seed, len(scores)).row(len(text_ids))
            scores = scores + self._temperature * noise.double()
        gap = abs(float(scores[own] - scores[other]))
        info = torch.finfo(logits.dtype)
        largest = max(abs(float(logits[own])), abs(float(logits[other])))
        return gap, info.bits == 16 and gap <= _NEAR_TIE_SPACINGS * info.eps * largest
