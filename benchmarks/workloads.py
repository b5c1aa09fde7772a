"""What is decoded: files of prompts, each of them a workload with a name of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

from card.errors import SettingsError

_SHIPPED = Path(__file__).parent / "prompts"


def shipped() -> list[str]:
    """Return the names of the workloads that come with the benchmarks."""
    return sorted(path.stem for path in _SHIPPED.glob("*.jsonl"))


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is decoded, in several workloads if wanted."""
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="JSON lines with a 'question' each, as in GSM8K; NAME=FILE names the workload, else the file does",
    )
    parser.add_argument(
        "--workload", default="", help=f"shipped prompts, one after the other: some of {','.join(shipped())}, or all"
    )


def find_workloads(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files by name, those of ``--prompts`` first. Raises: SettingsError for none, or names that clash."""
    found: dict[str, Path] = {}
    named = [_split(text) for text in args.prompts]
    wanted = shipped() if args.workload == "all" else [name for name in args.workload.split(",") if name]
    for name in wanted:
        if name not in shipped():
            raise SettingsError(f"unknown workload {name!r}; known: {', '.join(shipped())}, all; others by --prompts")
        named.append((name, _SHIPPED / f"{name}.jsonl"))
    for name, path in named:
        if name in found:
            raise SettingsError(f"two workloads are named {name!r}; give one of them another name with NAME=FILE")
        found[name] = path
    if not found:
        raise SettingsError(f"nothing to decode: give --prompts FILE, or --workload with some of {','.join(shipped())}")
    return found


def _split(text: str) -> tuple[str, Path]:
    """Return name and file of NAME=FILE, or of FILE, which is named after itself."""
    name, is_named, path = text.partition("=")
    return (name, Path(path)) if is_named else (Path(text).stem, Path(text))
