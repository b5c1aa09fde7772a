"""Count what grammars that propose what they force save on tool calls: tokens a target pass, with them and without.

    python benchmarks/server/tool_calls.py --target-cost 90M --out benchmarks/results/tool_calls.jsonl

Each question is answered by a call that a grammar holds, as `tool_choice: "required"` does it, in Hermes' format: with
the white space that models may write, and compact. A text must be that of plain decoding. The pair was not trained for
calls, so that what it puts into free values means nothing; bounds keep these short. Counts of `suffix` alone hardly
depend on what else the machine does. With a draft model the policy decides by time who writes, so that they do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from options import append_lines, describe_run

from card import LLM, SamplingParams
from card.api.outputs import RequestOutput
from card.config import Grammar
from card.server.tool_schemas import FunctionDefinition
from card.server.tools.grammar import ToolGrammar
from card.text.parts.answer_format import AnswerFormat
from card.text.parts.formats import HERMES
from card.text.parts.leads import Lead

_SHORT: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z ]{1,16}$"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 99}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather_forecast": {"city": _SHORT, "unit": {"enum": ["celsius", "fahrenheit"]}, "number_of_days": _COUNT},
    "create_calendar_event": {
        "title": _SHORT,
        "start_hour": _COUNT,
        "attendees": {"type": "array", "items": _SHORT, "minItems": 1, "maxItems": 3},
        "is_private": {"type": "boolean"},
    },
    "convert_currency": {"amount": _COUNT, "from_currency": {"enum": ["EUR", "USD"]}, "to_currency": {"const": "GBP"}},
    "search_products": {
        "query": _SHORT,
        "filters": {
            "type": "object",
            "properties": {"maximum_price": _COUNT, "in_stock_only": {"type": "boolean"}},
            "required": ["maximum_price", "in_stock_only"],
            "additionalProperties": False,
        },
        "page_size": {"enum": [10, 20, 50]},
    },
}
QUESTIONS = (
    "What will the weather in Oslo be like during the next 3 days?",
    "Tom meets Ann and Bob at 15 for a talk about the garden. Put it into the calendar.",
    "How many pounds are 40 euros?",
    "Find lamps below 30 dollars that can be had at once.",
)
# Writers without the grammar: those that a method has anyway. None: the default, which has the grammar.
ROWS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "suffix": ("suffix", ("suffix",)),
    "suffix and grammar": ("suffix", None),
    "card": ("card", ("beam", "suffix")),
    "card and grammar": ("card", None),
}


def grammar_of(name: str, *, is_compact: bool) -> Grammar:
    """Return the grammar of one call of a tool."""
    schema: dict[str, Any] = {"type": "object", "properties": TOOLS[name], "required": list(TOOLS[name])}
    if is_compact:
        schema["x-guidance"] = {"whitespace_flexible": False}
    form = AnswerFormat(name="hermes", calls=HERMES)
    functions = [FunctionDefinition(name=name, parameters=schema, strict=True)]
    return ToolGrammar(form, functions, Lead(form, {}, None), allows_several=False).forced()


def answers_of(llm: LLM, *, is_compact: bool, temperature: float) -> list[RequestOutput]:
    """Return the answer of each question by its own tool and by the next one, one after the other."""
    found, names = [], list(TOOLS)
    for seed, question in enumerate(QUESTIONS):
        for name in (names[seed], names[(seed + 1) % len(names)]):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=160, grammar=grammar_of(name, is_compact=is_compact)
            )
            found += llm.chat([{"role": "user", "content": question}], params)
    return found


def counts_of(answers: list[RequestOutput]) -> dict[str, Any]:
    """Return the counts of answers."""
    num_tokens = sum(len(one.outputs[0].token_ids) for one in answers)
    passes = sum(one.stats.target_passes + 1 for one in answers)  # and the one that ends the prompt
    accepted: Counter[str] = Counter()
    for one in answers:
        accepted.update(one.stats.accepted_by_writer)
    return {
        "tokens": num_tokens,
        "passes": passes,
        "tokens a pass": round(num_tokens / passes, 2),
        "drafted layers": sum(one.stats.drafter_layers for one in answers),
        "verified": sum(one.stats.verified_tokens for one in answers),
        "accepted": dict(accepted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--target-cost", help="parameters of a model whose price the target has, such as 90M")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    cells = [(is_compact, temperature) for is_compact in (False, True) for temperature in (0.0, 1.0)]
    with LLM(args.target, method="vanilla") as llm:
        plain = {
            cell: [one.outputs[0].token_ids for one in answers_of(llm, is_compact=cell[0], temperature=cell[1])]
            for cell in cells
        }
    for row, (method, writers) in ROWS.items():
        draft = args.draft if method == "card" else None
        with LLM(args.target, draft, method=method, writers=writers, target_cost=args.target_cost) as llm:
            for cell in cells:
                answers = answers_of(llm, is_compact=cell[0], temperature=cell[1])
                assert [one.outputs[0].token_ids for one in answers] == plain[cell], "the texts are plain decoding's"
                line = {"benchmark": "tool_calls", "row": row, "compact": cell[0], "temperature": cell[1]}
                line |= {**counts_of(answers), **describe_run()}
                print(json.dumps({name: line[name] for name in list(line)[:10]}), flush=True)
                if args.out is not None:
                    append_lines(args.out, [line])


if __name__ == "__main__":
    main()
