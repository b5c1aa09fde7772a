"""`card chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from card.cli.commands.text import system_turn
from card.cli.loops import without_loops
from card.cli.parts.chosen_models import make_llm
from card.cli.parts.interrupts import noting_interrupts
from card.cli.parts.options import pop_sampling_params
from card.cli.parts.remarks import demo_note, remark
from card.cli.parts.spelling import in_options
from card.cli.parts.starting import ReadingSpinner
from card.cli.parts.stats_line import stats_line
from card.cli.thinking import ThoughtLine
from card.cli.turns import FENCE, Turn, ask_user, let_lines_be_edited, read_turns
from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.errors import PromptError, plain_words

if TYPE_CHECKING:  # loaded by make_llm
    from card.api.llm import LLM

_WORDLESS = frozenset({"/reset", "/stats", "/thoughts", "/help", "/quit"})
_LEAVE = Turn("", command="/quit")
_NONE = "none"  # after /system
_HELP = f"""\
/system TEXT  set the system prompt from now on; /system shows it, /system {_NONE} leaves it out
/reset        forget the conversation; the system prompt stays
/thoughts     show what the model thought before its last answer
/stats        show what the last answer cost
/help         show this
/quit         leave; so does Ctrl-D
Ctrl-C        cut an answer short; the conversation continues with the text so far
several lines: end each but the last with a backslash, or begin and end with {FENCE}
in {FENCE}, a / at the beginning is plain text too"""


def run(stats: bool, system: str | None, **options: Any) -> None:
    """Run `card chat`."""
    params = pop_sampling_params(options)
    with make_llm(options) as llm:
        if llm.target_cost:
            click.echo(f"target costs {llm.target_cost}", err=True)
        if sys.stdin.isatty() and sys.stderr.isatty():
            _greet(llm)
        let_lines_be_edited()
        conversation = ChatSession(llm, params, shows_stats=stats, system=system or "")
        for turn in read_turns(ask_user):
            if not conversation.run_turn(turn):
                break


@dataclass(slots=True)
class ChatSession:
    """The conversation so far."""

    llm: LLM
    params: SamplingParams
    shows_stats: bool
    system: str = ""  # system prompt
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: RequestStats | None = None  # of the last answer
    thoughts: str = ""  # before it

    def run_turn(self, turn: Turn) -> bool:
        """Carry out a turn. Returns: whether the conversation continues."""
        if not turn.command:
            self._answer(turn.text)
        elif turn.command == "/system":
            self._set_system(turn.text)
        elif turn.command not in _WORDLESS:
            what = f"there is no {turn.command}; /help lists the commands, and how to send a line that begins like one"
            click.echo(f"card: {what}", err=True)
        elif turn.text:
            click.echo(f"card: {turn.command} takes no text, got {plain_words(turn.text, 40)!r}", err=True)
        elif turn.command == "/reset":
            self.messages = []
            click.echo("(forgotten)", err=True)
        elif turn.command == "/stats":
            self._tell_stats()
        elif turn.command == "/thoughts":
            click.echo(click.style(self.thoughts or "(no thoughts)", dim=True), err=True)
        elif turn.command == "/help":
            click.echo(_HELP, err=True)
        return turn != _LEAVE

    def _set_system(self, text: str) -> None:
        if text:
            self.system = "" if text == _NONE else text
            click.echo(f"({'the system prompt is set' if self.system else 'no system prompt'})", err=True)
        else:
            click.echo(self.system or "(no system prompt)", err=True)

    def _answer(self, text: str) -> None:
        """Stream the answer. The text so far becomes part of the conversation; a turn without text does not."""
        asked = {"role": "user", "content": text}
        answer = ""
        line = ThoughtLine()
        try:
            messages = [*system_turn(self.system), *self.messages, asked]
            reading = ReadingSpinner("reading")
            stream = self.llm.stream(messages, self.params, reads_parts=True, tell_read=reading.tell_read)
            read = without_loops(reading.until_first(stream), self.llm, self.params)
            with noting_interrupts() as interrupt, closing(read) as chunks:
                for chunk in chunks:
                    answer += chunk.text
                    self.stats = chunk.stats
                    line.show(chunk)
                    if interrupt.is_set():
                        break
        except PromptError as error:
            remedy = f", /system {_NONE} the system prompt" if self.system else ""
            click.echo(f"card: {in_options(error)} (/reset forgets the conversation{remedy})", err=True)
            return
        self.thoughts = line.end()
        click.echo(" [cut short]" if interrupt.is_set() else "")
        reason = chunk.finish_reason or ("interrupt" if interrupt.is_set() else None)
        remark(self.llm, self.params, chunk.stats.num_new_tokens, reason)
        if answer or self.thoughts:
            thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
            self.messages += [asked, {"role": "assistant", "content": answer, **thoughts}]
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
        click.echo(f"{note}.", err=True)
