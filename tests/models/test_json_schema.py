"""Schemas that refer to themselves: those that no text can end are told from those that one can."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.models.json_schema import has_an_end

ITSELF = {"$ref": "#"}
LEAF = {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF,
        {"anyOf": [ITSELF]},
        {"oneOf": [ITSELF, {"allOf": [LEAF, ITSELF]}]},
        {"allOf": [ITSELF, LEAF]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}},
        {"type": "object", "properties": {"a": ITSELF}, "required": ["a"]},
        {"type": "array", "items": ITSELF, "minItems": 1},
        {"type": "array", "prefixItems": [LEAF, ITSELF], "minItems": 2},
        {"$ref": "#/anyOf/0", "anyOf": [{"$ref": "#/anyOf/0"}, LEAF]},
    ],
    ids=str,
)
def test_what_only_leads_back_to_itself_has_no_end(schema: dict[str, Any]) -> None:
    assert not has_an_end(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        LEAF,
        {"anyOf": [ITSELF, LEAF]},
        {"anyOf": [LEAF, ITSELF]},
        {"type": "object", "properties": {"a": ITSELF}},
        {"type": "object", "properties": {"a": {"anyOf": [ITSELF, {"type": "null"}]}}, "required": ["a"]},
        {"type": "array", "items": ITSELF},
        {"type": "array", "items": ITSELF, "prefixItems": [LEAF], "minItems": 1},
        {"$ref": "#/nowhere"},
        {"$ref": "#/anyOf/7", "anyOf": [LEAF]},
        {"$ref": "https://elsewhere.example/schema"},
        {  # each needs the other one, which has a way out
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]},
                "c": LEAF,
            },
        },
    ],
    ids=str,
)
def test_what_may_stop_somewhere_has_an_end(schema: Any) -> None:
    assert has_an_end(schema)


@given(st.lists(st.tuples(st.sampled_from(["allOf", "anyOf"]), st.lists(st.integers(0, 7), min_size=1, max_size=3))))
def test_ends_are_those_that_a_plain_repetition_finds(rules: list[tuple[str, list[int]]]) -> None:
    """Definition i needs all or any of others; those beyond the last one are leaves."""
    ended = set(range(len(rules), 8))
    for _ in rules:
        for idx, (kind, others) in enumerate(rules[:8]):
            if (all if kind == "allOf" else any)(other in ended for other in others):
                ended.add(idx)
    definitions = {str(idx): {kind: [{"$ref": f"#/$defs/{other}"} for other in others]}
                   for idx, (kind, others) in enumerate(rules)}  # fmt: skip
    for idx in range(min(len(rules), 8)):
        schema = {"$ref": f"#/$defs/{idx}", "$defs": definitions}
        assert has_an_end(schema) == (idx in ended)


def test_a_chain_that_is_too_long_to_follow_is_left_to_others() -> None:
    definitions = {str(idx): {"$ref": f"#/$defs/{idx + 1}"} for idx in range(20_000)}
    assert has_an_end({"$ref": "#/$defs/0", "$defs": definitions})
