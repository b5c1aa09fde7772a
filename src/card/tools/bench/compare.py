"""Compare texts token for token, and tell whether a first difference is a near-tie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from card.config import ResolvedParams
from card.kernels.number_types import FLOAT32, STORED_DTYPES, Floats, dtype_name
from card.models.by_transformers import torch_module
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel
from card.models.protocol import Extension
from card.models.runners import plain_runner
from card.tools.bench.records import Check, Compared, GroupKey, Run, Sample, TextDifference, compared_texts
from card.tree.noise import GumbelNoise

# In 16-bit dtypes a first difference is a near-tie if the gap is at most this many spacings of the larger logit. Two
# orders of summation may differ by as much.
_NEAR_TIE_SPACINGS = 2.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Distance between two tokens in the target's logits."""

    logits: float | None  # None: one of the two texts ends there
    is_near_tie: bool  # rounding may bridge it


spacing_of: Any = ml_dtypes.finfo  # untyped


class TextJudge:
    """Measures the gap between the target's logits where two texts first differ."""

    def __init__(self, target: LoadedModel, params: ResolvedParams, *, rounds: bool = True) -> None:
        """Take the target and what the texts were decoded with.

        Args:
            rounds: whether rounding may differ at all; if not, nothing is a near-tie.
        """
        self._target, self._rounds = target, rounds
        self._temperature = params.temperature
        self._seed = params.seed
        self._gaps: dict[tuple[tuple[int, ...], int, int], Gap] = {}  # each difference is measured once

    def gap(self, prompt_ids: Sequence[int], ids: Sequence[int], plain: Sequence[int], position: int) -> Gap:
        """Return the gap at the first token that differs from plain decoding: by a plain pass over the common text."""
        if position >= min(len(ids), len(plain)):
            return Gap(None, is_near_tie=False)
        key = (*prompt_ids, *plain[:position]), ids[position], plain[position]
        if key not in self._gaps:
            self._gaps[key] = self._measured(*key)
        return self._gaps[key]

    def _logits(self, text_ids: tuple[int, ...]) -> Floats:
        """Return the logits [V] after a text, from the model's own modules if it has them."""
        if not isinstance(self._target, DecoderModel):
            theirs: Floats = torch_module("transformers.modules", "the target").own_logits(self._target, text_ids)
            return theirs
        runner = plain_runner(self._target, max_model_len=len(text_ids), max_tree_rows=0)
        logits: Floats = runner.forward([Extension.of_text(runner.open(), text_ids)])[0][-1]
        return logits

    def _measured(self, text_ids: tuple[int, ...], token: int, other_token: int) -> Gap:
        logits = self._logits(text_ids)
        scores = logits.astype(np.float64)
        if self._temperature > 0:  # sampling compares logits plus noise, in units of logits
            scores += self._temperature * GumbelNoise(self._seed, len(scores)).row(len(text_ids))
        gap = abs(float(scores[token] - scores[other_token]))
        dtype = STORED_DTYPES.get(dtype_name(self._target.dtype), FLOAT32)
        largest, spacing = max(abs(float(logits[token])), abs(float(logits[other_token]))), float(spacing_of(dtype).eps)
        is_near = self._rounds and dtype.itemsize == 2 and gap <= _NEAR_TIE_SPACINGS * spacing * largest
        return Gap(gap, is_near_tie=is_near)


def checks_of(
    run: Run, samples: Iterable[Sample], prompt_of: Callable[[Sample], Sequence[int]], judge: TextJudge
) -> list[Check]:
    """Return how the texts of each row compare with the baseline's.

    Args:
        samples: of the pair whose target the judge has.
        prompt_of: the token ids that a sample continues.
    """
    return [_check(group, texts, prompt_of, judge) for group, texts in compared_texts(run, samples).items()]


def _check(group: GroupKey, texts: Compared, prompt_of: Callable[[Sample], Sequence[int]], judge: TextJudge) -> Check:
    near_ties: dict[TextDifference, None] = {}  # a set that keeps the order: repeats differ in the same place
    faults: dict[TextDifference, None] = {}
    for sample, plain, position in texts.parted:
        gap = judge.gap(prompt_of(sample), sample.token_ids, plain.token_ids, position)
        difference = TextDifference(
            prompt=sample.prompt,
            turn=sample.turn,
            position=position,
            gap=gap.logits,
            token_id=sample.token_ids[position] if position < len(sample.token_ids) else None,
            plain_token_id=plain.token_ids[position] if position < len(plain.token_ids) else None,
        )
        (near_ties if gap.is_near_tie else faults)[difference] = None
    return Check(
        *group,
        num_texts=texts.num_texts,
        num_equal=texts.num_equal,
        near_ties=tuple(near_ties),
        is_same=not faults,
        differences=tuple(faults),
    )
