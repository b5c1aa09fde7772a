"""The `PrefixCache` of an engine, as the settings say: which rows of beginnings are kept between starts."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from pathlib import Path

from card.config import EngineSettings, parse_size
from card.errors import SettingsError, named
from card.machine.folders import expanded
from card.models.files.sources import find_source
from card.models.files.weights_digest import weights_digest
from card.models.protocol import Divisible
from card.models.rows.prefix_cache import PrefixCache
from card.models.rows.prefix_files import PrefixFiles
from card.models.runner import RowRunner

_SOURCES = ("kernels", "models")  # below the package: whatever decides about the numbers of a row
_USUAL_SIZE = "4GiB"
_NOTES = "weights.json"  # in the folder: see `weights_digest`


def prefix_cache(settings: EngineSettings, runner: RowRunner, *, is_named: bool) -> PrefixCache | None:
    """Return the cache of a target, None if the settings name no folder.

    Args:
        is_named: the target was given by name, not as an object.
    Raises: SettingsError if the folder or the target is not fit for it.
    """
    given = settings.prefix_cache
    if given is None:
        return None
    model = _divisible(runner, is_named=is_named)
    folder = expanded(given)
    try:
        digest = weights_digest(find_source(settings.target, settings.weights_dir), folder / _NOTES)
        identity = _identity(settings, runner, digest)
        most_bytes = parse_size(settings.prefix_cache_size or _USUAL_SIZE, "prefix_cache_size")
        files = PrefixFiles(folder, identity, model, most_bytes=most_bytes)
    except OSError as error:
        raise SettingsError(
            f"{named('prefix_cache')} must name a folder of your own to write to, and {given} cannot be used: "
            f"{error.strerror or error}"
        ) from error
    return PrefixCache(model, files)


def _divisible(runner: RowRunner, *, is_named: bool) -> Divisible:
    """Return a runner whose rows can be kept. Raises: SettingsError if they cannot."""
    if not is_named:
        reason = "was given as an object, and rows are kept by what the model's files hold; give its name"
    elif not (runner.is_exact and isinstance(runner, Divisible)):
        reason = "does not run in our own pass, so that its rows need not be the same after a restart"
    else:
        return runner
    raise SettingsError(f"this target {reason}; leave {named('prefix_cache')} out, or use another target")


def _identity(settings: EngineSettings, runner: RowRunner, digest: str) -> bytes:
    """Return what only rows of the same numbers have: by the model's files, how they are read, and our own code."""
    layout = runner.row_layout
    facts = {
        "weights": digest,
        "code": _code_digest(),
        "byteorder": sys.byteorder,
        "dtype": [settings.dtype, runner.precision, runner.has_blocks],
        "cost": settings.target_cost,
        "rows": [str(layout.dtype), *map(list, layout.layers)],
    }
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=32).digest()


@functools.cache
def _code_digest() -> str:
    """Return the digest of the sources of all passes: the same on every machine, as are the numbers that they give."""
    package = Path(__file__).parents[1]
    files = sorted(file for name in _SOURCES for file in (package / name).rglob("*.py"))
    sums = hashlib.blake2b(digest_size=32)
    for file in files:
        sums.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return sums.hexdigest()
