"""Downloads of GGUF files from the hub, with progress, before anything is loaded."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import click

from card.cli.parts.starting import Say, load, spinner
from card.models.files.known_pairs import gigabytes
from card.models.files.places import hub_file, local_model

_LINE_PERCENT = 10  # between two lines where standard error is no terminal


def fetch_models(*names: str | None) -> None:
    """Fetch the models that are single files on the hub. Raises: ModelError, one line."""
    for name in filter(None, names):
        place = hub_file(name) if local_model(name) is None else None
        if place is not None:
            sources = load("card.models.files.sources")
            with spinner(f"looking for {name}") as draw, sources.quiet():
                sources.fetch(name, *place, bar=partial(_bar, draw))


def _bar(draw: Say, name: str) -> type[Any]:
    """Return a subclass of the hub's progress bars that reports through ``draw`` and draws nothing itself."""
    is_drawn = sys.stderr is not None and sys.stderr.isatty()
    base: Any = import_module("tqdm").tqdm

    class Bar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._last_percent = -1
            super().__init__(*args, **{**settings, "file": StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            if not self.total:
                return
            percent = int(100 * self.n / self.total)
            percent -= 0 if is_drawn else percent % _LINE_PERCENT
            if percent != self._last_percent:
                self._last_percent = percent
                words = f"fetching {name}: {percent} % of {gigabytes(self.total)}"
                draw(words) if is_drawn else click.echo(f"card: {words}", err=True)

    return Bar
