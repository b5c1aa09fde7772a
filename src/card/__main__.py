"""The command `card`, also as `python -m card`: Ctrl-C is looked after before anything else is imported."""

from __future__ import annotations

from importlib import import_module

from card.interrupts import leave, set_handler


def main() -> None:
    """Run the command line and exit."""
    set_handler(leave)
    import_module("card.cli").main()


if __name__ == "__main__":
    main()
