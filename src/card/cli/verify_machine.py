"""`card verify-machine`: whether this computer gives the same bits as other computers."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console

from card.cli.parts.tables import table
from card.models.machine_digest import EXPECTED, digest_machine

_EQUAL = "Equal: logits of exact passes are the same here, to the last bit, as on every other computer that says so."
_DIFFERENT = "[bold]Different:[/bold] exact passes may write other texts here than elsewhere; please report it."


def run(*, as_json: bool) -> int:
    """Print the digest and whether it is the expected one; return 0 if it is, 1 if not."""
    result = digest_machine()
    if as_json:
        print(json.dumps({**asdict(result), "expected": EXPECTED}))
        return int(not result.is_expected)
    shown = table("", "")
    shown.show_header = False
    shown.add_row("processor", result.processor)
    shown.add_row("kernels", result.kernels)
    shown.add_row("digest", result.digest)
    shown.add_row("expected", EXPECTED)
    console = Console()
    console.print(shown)
    console.print(_EQUAL if result.is_expected else _DIFFERENT)
    return int(not result.is_expected)
