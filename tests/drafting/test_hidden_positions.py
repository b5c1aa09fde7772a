"""A drafter that is not told of a part of the prompt ranks its candidates by the noise of the target's positions."""

from __future__ import annotations

import numpy as np

from card.drafting.protocol import DraftWriter
from tests.drafts import draft_spec


def test_candidates_below_a_text_without_hidden_tokens_are_those_below_the_whole_text():
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    writer = DraftWriter(50, 64)
    found = {}
    for name, text, num_hidden in (
        ("whole", [9, 9, 9, 9, 3, 4], 0),
        ("visible", [3, 4], 4),
        ("misplaced", [3, 4], 0),
    ):
        sequence = writer.open(text, draft_spec(coupled_noise=True, num_hidden=num_hidden), epoch=0)
        found[name] = sequence.grow(sequence.frontier(), logits).tokens
    assert found["visible"] == found["whole"]
    assert found["misplaced"] != found["whole"]
