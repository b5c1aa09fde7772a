"""`RowsPart`: some rows of a text that are taken out together, and how large they are."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class RowsPart(NamedTuple):
    """Rows ``first`` to ``end`` of a text."""

    first: int
    end: int
    ends_text: bool  # what the text goes on from behind them is with them


class PartForm(Protocol):
    """The form that rows of one model have in files."""

    def part_bytes(self, part: RowsPart) -> int:
        """Return the size of some rows."""

    def usable_rows(self, num_rows: int, text_len: int) -> int:
        """Return how many of the first ``num_rows`` rows of a text of ``text_len`` can be used without the rest."""
