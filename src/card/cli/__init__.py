"""The command line: `card generate`, `card chat`, `card serve` and the rest.

Modules of `card.cli.commands` declare options for help and completion, and import nothing slow. The modules beside that
package do the work; they are loaded when their command runs.
"""

from card.cli.main import main

__all__ = ["main"]
