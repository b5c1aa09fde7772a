"""`card verify-server`: whether a server writes the same with and without speculation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from card import __version__
from card.cli.parts.files import read_prompts, writing
from card.cli.parts.starting import spinner
from card.cli.parts.tables import table
from card.errors import PromptError, SettingsError
from card.tools.bench.row_names import shipped_folder
from card.tools.verify_server.comparing import Difference
from card.tools.verify_server.settings import Address, VerifySettings, base_url, parse_plain_fields
from card.tools.verify_server.suite import Outcome, Report, Result, chosen, verify

_STYLES: dict[Outcome, str] = {"equal": "green", "differs": "bold red", "not supported": "dim", "failed": "bold red"}


def run(
    url: str,
    reference: str | None,
    plain_fields: str | None,
    model: str | None,
    reference_model: str | None,
    api_key: str | None,
    reference_api_key: str | None,
    only: tuple[str, ...] | None,
    skip: tuple[str, ...] | None,
    prompts: Path | None,
    limit: int,
    json_path: Path | None,
    **options: Any,
) -> int:
    """Run `card verify-server`; return the exit status."""
    if reference is None and reference_model is not None:
        raise SettingsError("--reference-model is for --reference; give both, or neither")
    if reference is not None and plain_fields is not None:
        raise SettingsError("--reference and --plain-fields exclude each other; give one of them")
    switch = None if plain_fields is None else parse_plain_fields(plain_fields)
    settings = VerifySettings(plain_fields=switch, **options)
    checks = chosen(only or (), skip or ())
    address = Address(url=base_url(url), model=model, api_key=api_key or None)
    other = None
    if reference is not None:
        other = Address(url=base_url(reference), model=reference_model, api_key=reference_api_key or None)
    path = prompts or shipped_folder() / "questions.jsonl"
    questions = read_prompts(path)[:limit]
    if len(set(questions)) < 2:  # questions at once must differ, or a server may answer all from one row
        raise PromptError(
            f"{path} with a limit of {limit} gives {len(set(questions))} prompts; 2 different ones or more are needed "
            "to ask several at once"
        )
    with spinner(f"asking {address.url}") as tell:
        report = asyncio.run(verify(address, other, questions, settings, checks, tell))
    if json_path is not None:
        _write(report, json_path)
    _print(Console(), report)
    for result in report.results:
        if result.outcome == "failed":
            click.echo(f"card: error: {result.title}: {result.reason}", err=True)
            break
    return report.status


def _write(report: Report, path: Path) -> None:
    content = {"card": __version__, "status": report.status, **asdict(report)}
    with writing(path) as place:
        place.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


# ---- output ----------------------------------------------------------------------------------------------------------


def _print(console: Console, report: Report) -> None:
    console.print(Text(f"{report.url}, {report.model}, by {report.path}"))
    console.print(Text(f"compared with {report.compared_with}"))
    console.print(Text(_what_is_compared(report)))
    console.print()
    shown = table("check", "outcome", numbers=("equal",))
    for column in shown.columns:
        column.no_wrap = True
    shown.add_column("what")
    for result in report.results:
        equal = f"{result.num_equal} of {result.num_asked}" if result.num_asked else ""
        outcome = Text(result.outcome, style=_STYLES[result.outcome])
        shown.add_row(result.title, outcome, equal, Text(_what(result).replace(report.url, "")))
    console.print(shown)
    for result in report.results:
        if result.differences:
            console.print()
            _print_difference(console, result)
    console.print()
    console.print(Text(_summary(report), style="bold red" if report.status else "bold green"))


def _what_is_compared(report: Report) -> str:
    what = "token ids and texts" if report.compares_ids else "texts; not both servers report token ids"
    if report.num_drafted is None:
        drafted = "the server does not report how much was drafted"
    else:
        drafted = f"{report.num_drafted} tokens were drafted"
        if report.num_drafted == 0:
            drafted += ": nothing was speculated, so equal answers prove nothing of speculation"
    if report.num_plain_drafted:
        drafted += f", {report.num_plain_drafted} of them for plain answers: these were not plain"
    return f"compared: {what}; {drafted}"


def _what(result: Result) -> str:
    if not result.differences:
        return result.reason
    first = result.differences[0]
    place = " from ".join((f"{first.what} of prompt {first.prompt_idx + 1}", *_places(first)[:1]))
    return f"{place}; {first.tie.partition(':')[0]}" if first.tie else place


def _print_difference(console: Console, result: Result) -> None:
    first, more = result.differences[0], len(result.differences) - 1
    places = f", from {', '.join(_places(first))}" if _places(first) else ""
    lines = [f"prompt {first.prompt_idx + 1}, {first.what}{places}"]
    lines += [f"after     {_quoted(first.before)}"] * bool(first.before)
    lines += [f"expected  {_quoted(first.expected)}", f"got       {_quoted(first.got)}", first.tie, first.note]
    lines += [f"and {more} more; --json FILE has them all"] * bool(more)
    console.print(Text(result.title, style="bold"))
    for line in filter(None, lines):
        console.print(Text(f"  {line}"))


def _places(difference: Difference) -> list[str]:
    places = {"token": difference.token_idx, "character": difference.char_idx}
    return [f"{name} {idx + 1}" for name, idx in places.items() if idx is not None]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _summary(report: Report) -> str:
    said = ", ".join(f"{count} {outcome}" for outcome in _STYLES if (count := report.count(outcome)))
    verdict = {0: "nothing differs", 1: "answers differ"}.get(report.status, "not all could be asked")
    return f"{verdict}: {len(report.results)} checks, {said}"
