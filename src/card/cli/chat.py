"""`card chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Any

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


@click.command(short_help="Talk with the target model.")
@click.option("--stats", is_flag=True, help="Print what each answer cost to standard error.")
@method_options
@sampling_options
@shaping_options
@draft_options
@model_options
def chat(stats: bool, **options: Any) -> None:
    """Talk with the target model.

    An empty line or Ctrl-D ends it, /clear forgets the conversation, Ctrl-C cuts an answer short.
    """
    params = take_sampling_params(options)
    with make_llm(options) as llm:
        if llm.target_cost:
            click.echo(f"target costs {llm.target_cost}", err=True)
        messages: list[dict[str, str]] = []
        while (line := _ask()) is not None:
            if line == "/clear":
                messages = []
                continue
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                for chunk in llm.stream(messages, params):
                    answer += chunk.text
                    click.echo(chunk.text, nl=False)
                    sys.stdout.flush()
                click.echo()
                if stats:
                    click.echo(stats_line(llm.method.name, chunk.stats, llm.target_cost), err=True)
            except PromptError as error:
                click.echo(f"card: {error} (/clear forgets the conversation)", err=True)
                messages.pop()
                continue
            except KeyboardInterrupt:
                click.echo(" [cut short]")
            messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    """Return the next line of the user, or None to end."""
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise PromptError("standard input is not valid UTF-8; convert it first") from None
    return line.strip() or None
