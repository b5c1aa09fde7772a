"""`card cache`: what is kept of models between starts, listed and removed."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from card.cli.parts.tables import show, table
from card.errors import SettingsError, named
from card.machine.folders import cache_folder
from card.models.files.kept_weights import KEPT_FOLDER, KeptEntry, KeptWeights
from card.models.files.known_pairs import gigabytes

_UNKNOWN = "unknown"  # the model of an entry that an older version made


def run(model: str | None, clear: bool, cache_dir: str | None, as_json: bool) -> None:
    """Run `card cache`. Raises: SettingsError for a folder that cannot be read, or a copy that cannot be removed."""
    folder = cache_folder(cache_dir) / KEPT_FOLDER
    try:
        entries = [one for one in KeptWeights(folder).entries() if model is None or _is_of(one, model)]
    except OSError as error:
        raise SettingsError(f"{folder} cannot be read: {error.strerror}; name another {named('cache_dir')}") from error
    if clear:
        _remove(entries)
    by_model: dict[str, list[KeptEntry]] = {}
    for one in entries:
        by_model.setdefault(one.source or _UNKNOWN, []).append(one)
    if as_json:
        click.echo(json.dumps({name: sum(one.num_bytes for one in group) for name, group in by_model.items()}))
        return
    made = table("model", numbers=("size", "last used"))
    for name, group in sorted(by_model.items()):
        used_at = datetime.fromtimestamp(max(one.used_at for one in group))
        made.add_row(name, gigabytes(sum(one.num_bytes for one in group)), f"{used_at:%Y-%m-%d %H:%M}")
    if entries:
        show(Console(), made, spare=("last used",))
    total = gigabytes(sum(one.num_bytes for one in entries))
    click.echo(f"{total} {'removed from' if clear else 'kept in'} {folder}")


def _is_of(entry: KeptEntry, model: str) -> bool:
    """Return whether an entry was made from a model: a file, a folder, or a name on the hub."""
    is_of_hub = f"models--{model.replace('/', '--')}" in Path(entry.source).parts  # where downloads lie
    return bool(entry.source) and (is_of_hub or os.path.realpath(entry.source) == os.path.realpath(model))


def _remove(entries: list[KeptEntry]) -> None:
    for one in entries:
        try:
            shutil.rmtree(one.folder)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            raise SettingsError(
                f"{one.folder} cannot be removed: {error.strerror or error}; remove it as the user who owns it"
            ) from error
