"""How many examples property tests draw: where they are the same ones each time, a third of those that are new."""

from __future__ import annotations

import os
from typing import Any

import hypothesis

EXAMPLES = "new" if os.environ.get("CARD_TEST_EXAMPLES") == "new" else "same"


def settings(*, max_examples: int, **others: Any) -> hypothesis.settings:
    """Return settings of a property test. ``max_examples``: of new ones."""
    most = max_examples if EXAMPLES == "new" else -(-max_examples // 3)
    return hypothesis.settings(max_examples=most, **others)
