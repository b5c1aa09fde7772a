"""`card keys`: the keys of a draft server and of its clients."""

from __future__ import annotations

from pathlib import Path

import click

from card.cli.help import command
from card.cli.lazy import load


@command(short_help="Make the keys of a draft server and its clients.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--client", "clients", multiple=True, help="Name of a client; may be given several times.")
def keys(folder: Path, clients: tuple[str, ...]) -> None:
    """Make DIR/server for the machine of `card draft-server`, and DIR/client (or DIR/NAME) for each client's machine.

    With --client, a server that is there already keeps its keys and gets to know the new clients; start it again then.
    Nothing is overwritten.
    """
    for path in load("card.transport.keys", "").make_keys(folder, clients):
        click.echo(f"{path}")
