"""The command line: `card generate`, `card chat`, `card serve` and the rest.

Modules of `card.cli.commands` declare what help and completion need, and import nothing that computes. The modules
beside that package do the work; they are loaded when their command runs.
"""

from card.cli.main import main

__all__ = ["main"]
