"""A toy with experts: each row chooses some in each layer by its token alone, so equal tokens meet the same ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from card.kernels.number_types import Floats
from card.models.protocol import Extension
from tests.toy import TableModel


@dataclass(frozen=True)
class ExpertFacts:
    """Facts of the toy's expert layers."""

    num_expert_layers: int = 3
    num_experts: int = 32
    experts_per_token: int = 4


class RoutedTable(TableModel):
    """A table model whose passes count the distinct experts that they read."""

    experts = ExpertFacts()
    experts_read = 0
    seconds_of = (0.0, 0.0, 0.0)  # of a pass on the toy's own clock: of itself, of each expert, of each row
    now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        token_ids = [token_id for one in extensions for token_id in one.token_ids]
        self.experts_read = len(set[tuple[int, int]]().union(*map(chosen_by, token_ids)))
        pass_s, expert_s, row_s = self.seconds_of
        self.now_s += pass_s + expert_s * self.experts_read + row_s * len(token_ids)
        return super().forward(extensions)


@cache
def chosen_by(token_id: int) -> frozenset[tuple[int, int]]:
    """Return the experts of a token, each with its layer."""
    draw, facts = random.Random(token_id), RoutedTable.experts
    chosen = (draw.sample(range(facts.num_experts), facts.experts_per_token) for _ in range(facts.num_expert_layers))
    return frozenset((layer, expert) for layer, experts in enumerate(chosen) for expert in experts)
