"""Choice of the KV rows that a model reads when it drafts for itself: how many, and by which scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from card.errors import SettingsError

ScoreKind = Literal["weights", "logits"]
"""Attention weights (after the softmax) or logits (before it)."""


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """The KV rows that a drafting pass reads: the best by the attention of the last verification, and the newest."""

    scores: ScoreKind  # whose mean over the rows of a verification and the query heads of a KV head ranks them
    share: float  # of a text's rows that are read, in (0, 1]
    least: int  # rows that are read at least, the newest included

    def num_read(self, num_rows: int) -> int:
        """Return how many of ``num_rows`` rows are read, the newest included."""
        return min(num_rows, max(self.least, math.ceil(self.share * num_rows)))


PUBLISHED: Mapping[str, SelectionRule] = MappingProxyType(
    {
        "sparse": SelectionRule("weights", 0.05, 128),  # SparseSpec, arXiv:2512.01278
        "vegas": SelectionRule("logits", 0.07, 256),  # arXiv:2602.07223
    }
)


def parse_selection(text: str) -> SelectionRule:
    """Return the rule that ``sparse``, ``vegas`` or ``sparse:0.1:64`` (share and least number of rows) means.

    Raises: SettingsError for an unknown rule, or numbers out of range.
    """
    name, *numbers = text.split(":")
    rule = PUBLISHED.get(name)
    try:
        share = float(numbers[0]) if numbers else cast(SelectionRule, rule).share
        least = int(numbers[1]) if len(numbers) > 1 else cast(SelectionRule, rule).least
    except (ValueError, AttributeError):
        share, least = 0.0, 0
    if rule is None or len(numbers) > 2 or not 0.0 < share <= 1.0 or least < 1:
        raise SettingsError(
            f"a selection of KV rows must be {' or '.join(PUBLISHED)}, with a share above 0 and at most 1 and a least "
            f"number of rows of 1 or more if wanted, such as sparse:0.05:128, got {text!r}"
        )
    return SelectionRule(rule.scores, share, least)
