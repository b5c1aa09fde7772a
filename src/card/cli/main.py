"""The command `card`: every error of ours or of the arguments is one line and exit status 2."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys

import click

from card import __version__
from card.cli.parts.command import StderrHandler
from card.cli.parts.groups import CardGroup
from card.cli.parts.interrupts import INTERRUPTED, is_interrupt, raising
from card.config.record import Command
from card.errors import CardError, ShortageError, spelled
from card.machine.memory import is_shortage
from card.models.shortage import shortage_in_words

_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of an output that takes no more

_COMMANDS = (
    Command("generate", "Continue or answer a prompt.", "card.cli.commands.text:generate"),
    Command("chat", "Talk with the target model.", "card.cli.commands.text:chat"),
    Command("serve", "Serve a model over HTTP.", "card.cli.commands.serve:serve"),
    Command("demo", "Watch the methods side by side on the built-in pair.", "card.cli.commands.text:demo"),
    Command("methods", "List decoding methods.", "card.cli.commands.machine:methods"),
    Command("pairs", "List known pairs.", "card.cli.commands.machine:pairs"),
    Command("cache", "List or clear kept weights.", "card.cli.commands.machine:cache"),
    Command("draft-server", "Draft for targets on other machines.", "card.cli.commands.serve:draft_server"),
    Command("keys", "Make the keys of a draft server and its clients.", "card.cli.commands.serve:keys"),
    Command(
        "verify-machine",
        "Check that exact passes give the same results here as elsewhere.",
        "card.cli.commands.machine:verify_machine",
    ),
)


@click.group(
    cls=CardGroup, own=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, "-V", "--version", prog_name="card")
def cli() -> None:
    """Faster text from large language models, word for word the same: CARD, query and correct."""


def main() -> None:
    """Run the command line and exit; if the reader of the output has gone, click exits quietly with status 1."""
    handler = StderrHandler()
    logging.basicConfig(level=logging.ERROR, format="card: %(message)s", handlers=[handler])
    logging.getLogger("card.models").setLevel(logging.WARNING)  # such as a model that runs in an unexpected way
    try:
        with raising():
            status = cli.main(sys.argv[1:], prog_name="card", standalone_mode=False)
            sys.stdout.flush()  # so that an output that is full is noticed
    except click.ClickException as error:
        _fail(error, error.format_message())
    except CardError as error:
        _fail(error, _of_memory() if is_shortage(error) and not isinstance(error, ShortageError) else str(error))
    except (click.Abort, KeyboardInterrupt):
        _end_interrupted()
    except Exception as error:
        if is_shortage(error):
            _fail(error, _of_memory())
        if isinstance(error, OSError) and error.errno in _LOST and error.filename is None:
            _leave_output()
            _fail(error, f"the output cannot be written: {error.strerror}; write to another place")
        if not is_interrupt(error):
            raise
        _end_interrupted()
    sys.exit(status if isinstance(status, int) else 0)


def _of_memory() -> str:
    return spelled(shortage_in_words(), lambda setting: f"--{setting.replace('_', '-')}")


def _leave_output() -> None:
    """Drop what is still to be written: Python would try again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception, message: str) -> None:
    if is_interrupt(error):
        _end_interrupted()
    click.echo(f"card: error: {' '.join(message.split())}", err=True)
    sys.exit(2)


def _end_interrupted() -> None:
    """End after Ctrl-C, with the terminal's cursor at the start of a line."""
    if sys.stderr is not None and sys.stderr.isatty():
        click.echo(err=True)
    sys.exit(INTERRUPTED)
