"""Tells how this package was installed, so that messages can name a command that adds one of its extras."""

from __future__ import annotations

import functools
import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_PACKAGE = "card-decoding"
_ROOT = Path(__file__).parents[3]  # of the checkout, if the code runs from one


def install_command(extra: str) -> str:
    """Return the command that adds an extra of this package, taken from where the package came from.

    Source of the record that installers leave: https://packaging.python.org/en/latest/specifications/direct-url/
    """
    origin = _origin()
    url, folder = origin.get("url", ""), origin.get("dir_info")
    if folder is not None:
        path = Path(unquote(urlsplit(url).path))
        option = "-e " if folder.get("editable") else ""
        return f"pip install {option}{shlex.quote(f'{_from_here(path)}[{extra}]')}"
    wanted = f"{_PACKAGE}[{extra}]"
    if url:
        vcs = origin.get("vcs_info")
        place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
        inside = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
        wanted += f" @ {place}{inside}"
    return f"pip install {shlex.quote(wanted)}"


@functools.cache  # each look reads all that a package tells of itself
def installed_version(package: str) -> str:
    """Return the version of a package without importing it; "none" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _origin() -> dict[str, Any]:
    """Return what the installer noted about where the package came from; empty if it came from an index."""
    try:
        noted = distribution(_PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:  # it runs from a checkout that is not installed
        is_checkout = (_ROOT / "pyproject.toml").is_file()
        return {"url": _ROOT.as_uri(), "dir_info": {"editable": True}} if is_checkout else {}
    found: dict[str, Any] = json.loads(noted) if noted else {}
    return found


def _from_here(path: Path) -> str:
    try:
        return "." if path.samefile(".") else str(path)
    except OSError:  # one of the two is gone
        return str(path)
