"""`card chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from card.cli.commands.text import stats_line
from card.cli.interrupts import noting_interrupts
from card.cli.options import demo_note, make_llm, remark, take_sampling_params
from card.cli.starting import spin_until_first
from card.config import SamplingParams
from card.errors import PromptError
from card.workers.metrics import RequestStats

if TYPE_CHECKING:  # loaded by make_llm
    from card.api.llm import LLM

_HELP = """\
/reset    forget the conversation
/stats    show what the last answer cost
/help     show this
/quit     leave; so do Ctrl-D and an empty line
Ctrl-C    cut an answer short; the conversation goes on with what was said"""


def run(stats: bool, **options: Any) -> None:
    """Do what `card chat` was asked for."""
    params = take_sampling_params(options)
    with make_llm(options) as llm:
        if llm.target_cost:
            click.echo(f"target costs {llm.target_cost}", err=True)
        if sys.stdin.isatty() and sys.stderr.isatty():
            _greet(llm)
        conversation = Conversation(llm, params, shows_stats=stats)
        while (line := _ask()) is not None and line != "/quit":
            conversation.take(line)


@dataclass(slots=True)
class Conversation:
    """The conversation so far."""

    llm: LLM
    params: SamplingParams
    shows_stats: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: RequestStats | None = None  # of the last answer

    def take(self, line: str) -> None:
        """Do what a line of the user asks for."""
        if line == "/reset":
            self.messages = []
            click.echo("(forgotten)", err=True)
        elif line == "/stats":
            self._tell_stats()
        elif line == "/help":
            click.echo(_HELP, err=True)
        elif line.startswith("/") and " " not in line and "/" not in line[1:]:
            click.echo(f"card: there is no {line}; /help lists what there is", err=True)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Stream the answer. The turn is remembered as far as it got, and not at all if nothing came."""
        asked = {"role": "user", "content": line}
        answer = ""
        try:
            stream = self.llm.stream([*self.messages, asked], self.params)
            with noting_interrupts() as interrupt, closing(spin_until_first(stream, "reading")) as chunks:
                for chunk in chunks:
                    answer += chunk.text
                    self.stats = chunk.stats
                    click.echo(chunk.text, nl=False)
                    sys.stdout.flush()
                    if interrupt.is_set():
                        break
        except PromptError as error:
            click.echo(f"card: {error} (/reset forgets the conversation)", err=True)
            return
        click.echo(" [cut short]" if interrupt.is_set() else "")
        remark(self.llm, self.params, chunk.stats.num_new_tokens, chunk.finish_reason)
        if answer:
            self.messages += [asked, {"role": "assistant", "content": answer}]
        if self.shows_stats:
            self._tell_stats()

    def _tell_stats(self) -> None:
        if self.stats is None:
            click.echo("card: there is no answer yet", err=True)
        else:
            click.echo(stats_line(self.llm.method.name, self.stats, self.llm.target_cost), err=True)


def _greet(llm: LLM) -> None:
    settings = llm.settings
    drafted = f", {settings.draft} drafts" if settings.draft else ""
    click.echo(f"{settings.target} answers{drafted} (method {llm.method.name}). /help lists commands.", err=True)
    if note := demo_note(settings.target):
        click.echo(note, err=True)


def _ask() -> str | None:
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise PromptError("standard input is not valid UTF-8; convert it first") from None
    return line.strip() or None
