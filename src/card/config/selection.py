"""Choice of the KV rows that a self-drafting model reads: how many, and by which scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from card.config.knobs import parse_named
from card.errors import SettingsError

ScoreKind = Literal["weights", "logits", "bounds"]
"""Attention weights (after the softmax), logits (before it), or bounds that no logit of a block of rows exceeds."""
BLOCK_ROWS = 16  # rows of a block; bounds choose whole blocks


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """The KV rows that a drafting pass reads: the best by the last verification's attention, and the newest."""

    scores: ScoreKind  # whose mean over the rows of a verification and the query heads of a KV head ranks them
    share: float  # of a text's rows that are read, in [0, 1]
    least: int  # fewest rows read, including the newest
    num_first: int = 0  # rows at the beginning of a text that are always read too
    num_last: int = 0  # rows before the newest ones, also always read

    def num_read(self, num_rows: int) -> int:
        """Return how many of ``num_rows`` rows are read; the newest are among them unless blocks are chosen."""
        chosen = max(self.least, math.ceil(self.share * num_rows))
        return min(num_rows, chosen + self.num_first + self.num_last)


@dataclass(frozen=True, slots=True)
class SelfDrafting:
    """Settings of a target that drafts for itself."""

    rule: SelectionRule
    num_looked_up: int = 0  # candidates that a drafting pass verifies, from earlier in the text; 0: none, and phases


PUBLISHED: Mapping[str, SelectionRule] = MappingProxyType(
    {
        "sparse": SelectionRule("weights", 0.05, 128),  # SparseSpec, arXiv:2512.01278
        "vegas": SelectionRule("logits", 0.07, 256),  # arXiv:2602.07223
        "quest": SelectionRule("bounds", 0.0, 4096, 2 * BLOCK_ROWS, 8 * BLOCK_ROWS),  # SpecPV, arXiv:2512.02337
    }
)


def parse_selection(text: str) -> SelectionRule:
    """Return the rule named ``sparse``, ``vegas``, ``quest`` or ``sparse:0.1:64`` (share, least number of rows).

    Raises: SettingsError for an unknown rule, or numbers out of range.
    """
    named = parse_named(text, 2)
    if (rule := PUBLISHED.get(named.name)) is not None:
        share, least = named.number(0, rule.share, float), named.number(1, rule.least, int)
        if share is not None and least is not None and 0.0 <= share <= 1.0 and least >= 1:
            return replace(rule, share=share, least=least)
    raise SettingsError(
        f"a selection of KV rows must be one of {', '.join(PUBLISHED)}, with a share from 0 to 1 and a least number of "
        f"rows of 1 or more if wanted, such as sparse:0.05:128, got {text!r}"
    )
