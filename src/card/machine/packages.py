"""Tells how this package was installed, so that messages can name a command that adds one of its extras."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_PACKAGE = "card-decoding"
_WITH_TORCH = ("torch", "images", "train")  # extras
_SMALL_TORCH = "https://download.pytorch.org/whl/cpu"
_ROOT = Path(__file__).parents[3]  # of the checkout, if the code runs from one


def install_command(extra: str) -> str:
    """Return the command that adds an extra of this package, for the Python that runs and from where it came from.

    PyTorch comes first and in its small build, which needs no GPU: the index has one of several gigabytes.

    Source of the record that installers leave: https://packaging.python.org/en/latest/specifications/direct-url/
    """
    pip = f"{shlex.quote(sys.executable or 'python3')} -m pip install "
    is_first = extra in _WITH_TORCH and find_spec("torch") is None
    first = f"{pip}torch --index-url {_SMALL_TORCH} && " if is_first else ""
    return f"{first}{pip}{_wanted(extra)}"


def _wanted(extra: str) -> str:
    origin = _origin()
    url, folder = origin.get("url", ""), origin.get("dir_info")
    if folder is not None:
        path = Path(unquote(urlsplit(url).path))
        option = "-e " if folder.get("editable") else ""
        return f"{option}{shlex.quote(f'{_from_here(path)}[{extra}]')}"
    wanted = f"{_PACKAGE}[{extra}]"
    if url:
        vcs = origin.get("vcs_info")
        place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
        inside = f"#subdirectory={origin['subdirectory']}" if origin.get("subdirectory") else ""
        wanted += f" @ {place}{inside}"
    return shlex.quote(wanted)


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
    record: dict[str, Any] = json.loads(noted) if noted else {}
    return record


def _from_here(path: Path) -> str:
    try:
        return "." if path.samefile(".") else str(path)
    except OSError:  # one of the two is gone
        return str(path)
