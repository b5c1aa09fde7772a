"""The part of a long text that a draft model reads: its first tokens, which attention leans on, and its last ones.

The end moves in steps, so that a text that goes on, as the next turn of a chat does, mostly finds its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST_TOKENS, _LAST_TOKENS, _STEP = 16, 1024, 512
MOST_READ = _FIRST_TOKENS + _LAST_TOKENS + _STEP - 1  # tokens


def num_skipped(length: int) -> int:
    """Return how many tokens of a text of this length, behind its first few, a draft model leaves out."""
    return max(0, length - _FIRST_TOKENS - _LAST_TOKENS) // _STEP * _STEP


def read_part(token_ids: Sequence[int], skipped: int) -> Sequence[int]:
    """Return a text without so many tokens behind its first few."""
    return [*token_ids[:_FIRST_TOKENS], *token_ids[_FIRST_TOKENS + skipped :]] if skipped else token_ids
