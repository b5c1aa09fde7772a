"""`card generate`: one prompt in, text streamed out."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any, TextIO

import click

from card.cli.options import (
    draft_options,
    make_llm,
    method_options,
    model_options,
    sampling_options,
    shaping_options,
    take_sampling_params,
)
from card.cli.report import stats_line
from card.errors import PromptError
from card.trace import write_trace


@click.command(short_help="Continue or answer a prompt.")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--stats", is_flag=True, help="Print what it cost to standard error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--trace",
    "trace_file",
    type=click.File("w", encoding="utf-8", lazy=False),
    help="Write what happened when, for ui.perfetto.dev or chrome://tracing.",
)
@method_options
@sampling_options
@shaping_options
@draft_options
@model_options
def generate(
    prompt: str | None, raw: bool, stats: bool, as_json: bool, trace_file: TextIO | None, **options: Any
) -> None:
    """Answer PROMPT, or standard input if there is no PROMPT or it is "-"; the text streams to standard output."""
    prompt = _read_stdin() if prompt in (None, "-") else prompt
    assert prompt is not None
    params = take_sampling_params(options)
    if not prompt:
        raise PromptError("the prompt is empty; give at least one character")
    with make_llm(options) as llm:
        chunks = []
        with llm.trace() if trace_file else nullcontext() as trace:
            for chunk in llm.stream(prompt if raw else [{"role": "user", "content": prompt}], params):
                chunks.append(chunk)
                if not as_json:
                    click.echo(chunk.text, nl=False)
                    sys.stdout.flush()
        last = chunks[-1]
        if trace_file and trace:
            about = {"method": llm.method.name, "target": llm.settings.target, "target_cost": llm.target_cost or ""}
            write_trace(trace_file, {llm.method.name: trace}, about)
        if as_json:
            result = {
                "text": "".join(chunk.text for chunk in chunks),
                "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
                "finish_reason": last.finish_reason,
                "method": llm.method.name,
                "exact": llm.method.is_exact,
                "target_cost": llm.target_cost,
                "stats": last.stats.as_dict(),
            }
            click.echo(json.dumps(result, ensure_ascii=False))
            return
        click.echo()
        if stats or llm.target_cost:
            click.echo(stats_line(llm.method.name, last.stats, llm.target_cost), err=True)


def _read_stdin() -> str:
    """Return standard input as text. Raises: PromptError if it is a terminal or not valid UTF-8."""
    if sys.stdin is None or sys.stdin.isatty():  # None: closed by the caller
        raise PromptError("no prompt: give it as an argument or on standard input")
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").strip("\n")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it first"
        ) from None
