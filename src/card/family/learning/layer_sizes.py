"""Sizes of the layers of drafting heads, which are the same in training and where they draft."""

from card.config.fields import require

EPS = 1e-6  # of norms
ROTARY_BASE = 10_000.0
_HEAD_SIZE = 64  # or the whole width, if that is below


def heads_of(width: int) -> int:
    """Return the number of heads of a layer."""
    return max(1, width // _HEAD_SIZE)


def require_width(width: int) -> None:
    """Check the width of a layer: its heads are of one even size. Raises: SettingsError."""
    is_right = width % _HEAD_SIZE == 0 or (4 <= width < _HEAD_SIZE and width % 4 == 0)
    require(is_right, "width", f"a multiple of {_HEAD_SIZE}, or of 4 below", width)
