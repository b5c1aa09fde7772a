"""The command `card`, also as `python -m card`: Ctrl-C is looked after before anything else is imported."""

from __future__ import annotations

import os
import signal
from importlib import import_module

_INTERRUPTED = 130  # as in card.cli.parts.interrupts, which is not imported yet


def main() -> None:
    """Run the command line and exit."""
    if os.name == "nt":
        raise SystemExit(f"card: error: {import_module('card').ON_WINDOWS}")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if we were started with it ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    import_module("card.machine.environment").settle()
    import_module("card.cli").main()


if __name__ == "__main__":
    main()
