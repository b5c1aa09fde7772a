"""A source of features for toy models, and a consumer that notes what it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from card.engine.watchers import Watchers
from card.kernels.number_types import Floats
from card.models.features import FeatureWish, Rows, SeenRows
from card.models.protocol import Extension
from tests.toy import TableModel


class TokenStates:
    """The hidden state of a row is its token: looks on as a toy model runs."""

    def __init__(self, model: TableModel) -> None:
        self.wishes: Sequence[FeatureWish] = ()
        self._extensions: Sequence[Extension] = ()
        forward: Callable[..., Any] = model.forward

        def watched(extensions: Sequence[Extension]) -> list[Floats]:
            self._extensions = extensions
            logits: list[Floats] = forward(extensions)
            return logits

        model.forward = watched  # type: ignore[method-assign]

    def wish(self, wishes: Sequence[FeatureWish]) -> None:
        self.wishes = wishes

    def of(self, extension_idx: int, wish: FeatureWish) -> Floats:
        one = self._extensions[extension_idx]
        first = 0 if wish.rows == "all" else one.first_logits_idx
        return np.array(one.token_ids[first:], np.float32)[:, None]


class Notes:
    """Notes of what rows it was shown; says ``told`` in turn."""

    def __init__(self, rows: Rows, told: Callable[[], float | None] = lambda: None) -> None:
        self.wish = FeatureWish((-1,), rows)
        self.seen: list[tuple[int, int, list[int]]] = []  # request, place of the first row, what the rows hold
        self.has_drafter: set[bool] = set()
        self._told = told

    def observe(self, seen: SeenRows) -> float | None:
        held = seen.features[:, 0].tolist()
        assert seen.token_ids[seen.first : seen.first + len(held)] == held, "the rows are those of the text"
        self.seen.append((seen.request_id, seen.first, held))
        self.has_drafter.add(seen.has_drafter)
        return self._told()


def watched(model: TableModel, *consumers: Notes) -> Watchers:
    """Return what shows the consumers the tokens of a toy model's rows."""
    return Watchers(TokenStates(model), consumers)
