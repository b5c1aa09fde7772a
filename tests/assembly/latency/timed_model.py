"""A model on its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from card.models.protocol import Extension
from tests.toy import TableModel


class TimedModel(TableModel):
    """A table model whose passes take what ``seconds`` says of (tokens, sequences, rows held), on its own clock."""

    def __init__(self, seconds: Callable[[int, int, int], float], **options: int) -> None:
        super().__init__(1, **options)
        self.now_s = 0.0
        self._seconds = seconds

    def clock(self) -> float:
        return self.now_s

    def forward(self, extensions: Sequence[Extension]) -> list[Tensor]:
        num_tokens = sum(len(extension.token_ids) for extension in extensions)
        num_rows = sum(self.num_rows(extension.slot) for extension in extensions)
        self.now_s += self._seconds(num_tokens, len(extensions), num_rows)
        return super().forward(extensions)
