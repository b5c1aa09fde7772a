"""The pair of models that writes steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from card import LLM
from tests.pair import Pair


@pytest.fixture(scope="module")
def llms(pair: Pair) -> Iterator[tuple[LLM, LLM]]:
    speculating = {"method": "sps", "placement": "inline", "policy": "fixed"}
    with (
        LLM(pair.target, pair.draft, dtype="float32", **speculating) as target,
        LLM(pair.draft, dtype="float32", method="vanilla") as draft,
    ):
        yield target, draft
