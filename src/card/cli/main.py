"""Entry point of the command `card`: every error of ours or of the arguments is one line and exit status 2."""

from __future__ import annotations

import logging
import sys

import click

from card import __version__
from card.cli.bench import bench
from card.cli.bench_report import report
from card.cli.chat import chat
from card.cli.check_pair import check_pair
from card.cli.demo import demo
from card.cli.draft_server import draft_server
from card.cli.generate import generate
from card.cli.keys import keys
from card.cli.plan import plan
from card.cli.profile import profile
from card.cli.record import record
from card.cli.serve import serve
from card.cli.train import train
from card.errors import CardError

_INTERRUPTED = 130  # 128 + SIGINT, what shells expect


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="card")
@click.option("-v", "--verbose", is_flag=True, help="Log to standard error what happens to the drafter.")
def cli(verbose: bool) -> None:
    """Faster text from large language models, word for word the same: CARD, query and correct."""
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="card: %(message)s")


for command in (
    generate,
    chat,
    serve,
    demo,
    check_pair,
    draft_server,
    keys,
    train,
    report,
    profile,
    record,
    plan,
    bench,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit; if the reader of the output has gone, quietly with status 1 (click sees to it)."""
    try:
        status = cli.main(sys.argv[1:] or ["--help"], prog_name="card", standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message())
    except CardError as error:
        _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    click.echo(f"card: error: {' '.join(message.split())}", err=True)
    sys.exit(2)
