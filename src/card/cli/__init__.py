"""The command line: `card generate`, `card chat`, `card demo`."""

from card.cli.main import main

__all__ = ["main"]
