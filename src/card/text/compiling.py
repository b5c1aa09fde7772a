"""The calls of llguidance that compile a grammar, in the child that tries it and in the process that then uses it.

Light on imports: the child must be there soon, and small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST_CHARS = 1 << 20  # of a grammar; five times what schemas with hundreds of tools have
_JSON_OBJECT = '{"type": "object"}'
# A blank, or a new line with its indentation: a model that likes white space must not go on with it for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}
COMPACT: Any = {"whitespace_flexible": False}  # an option by which JSON has no white space
ANSWER_RULE = "held_answer"  # of a grammar in Lark's notation that stands behind something else
GBNF_BEHIND = "\n# what follows is GBNF\n"  # between the rules before an answer, in Lark's notation, and its grammar
_WORDS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|%\w+|\bstart\b')
OPTIONS_KEY = "x-guidance"  # of a schema, whose options of the library are there
# The library's own values, but for the states: it would let one text's lexer grow to half a gigabyte.
_LIMITS: Any = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 KB each
    "max_grammar_size": 500_000,  # symbols
}


def wrap_tokens(core: str, num_ids: int, end_ids: Sequence[int]) -> Any:
    """Return llguidance's own tokenizer. Raises: ImportError, and llguidance's errors for an unknown tokenizer."""
    import llguidance

    return llguidance.LLTokenizer(core, n_vocab=num_ids, eos_token=list(end_ids))


def compile_grammar(tokens: Any, kind: str, source: str) -> Any:
    """Return a matcher at the beginning of a grammar.

    Args:
        kind: of `Grammar`, GBNF left out.
    Raises: ImportError; ValueError with the library's message for a grammar that it cannot use.
    """
    import llguidance

    kinds = llguidance.LLMatcher
    if kind == "regex":
        text = kinds.grammar_from_regex(source)
    elif kind == "lark":
        text = kinds.grammar_from_lark(source)
    else:
        options = None if _is_compact(source) else JSON_OPTIONS
        text = kinds.grammar_from_json_schema(source or _JSON_OBJECT, overrides=options)
    matcher = kinds(tokens, text, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with options of the library, which yield to those that it has itself.

    A schema that says `COMPACT` keeps to that, whatever white space the options allow.
    """
    stated = schema.get(OPTIONS_KEY, {})
    if not isinstance(stated, dict):
        return dict(schema)  # the library says what is wrong
    if stated.get("whitespace_flexible") is False:
        options = {name: value for name, value in options.items() if name != "whitespace_pattern"}
    return {**schema, OPTIONS_KEY: {**options, **stated}}


def _is_compact(source: str) -> bool:
    """Return whether a schema asks for JSON without white space."""
    if OPTIONS_KEY not in source:
        return False
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):  # the library says what is wrong
        return False
    options = schema.get(OPTIONS_KEY) if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("whitespace_flexible") is False


def as_lark(source: str) -> str:
    """Return a grammar in GBNF, or what stands before it and such a grammar, in Lark's notation.

    Raises: ImportError; ValueError if it cannot be read.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    before, is_behind, grammar = source.rpartition(GBNF_BEHIND)
    try:
        lark = str(gbnf_to_lark(grammar))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"it cannot be read as GBNF: {error}") from None
    return f"{before}\n{as_answer(lark)}" if is_behind else lark


def as_answer(lark: str) -> str:
    """Return a grammar in Lark's notation that begins with `ANSWER_RULE` in place of `start`."""
    return _WORDS.sub(lambda found: ANSWER_RULE if found[0] == "start" else found[0], lark)


def is_gbnf(source: str) -> bool:
    """Return whether a grammar is in GBNF, as llama.cpp's and vLLM's users write it, and not in Lark's notation."""
    return re.search(r"^[ \t]*root[ \t]*::=", source, re.MULTILINE) is not None
