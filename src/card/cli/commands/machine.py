"""The options of the commands about methods, pairs and this machine."""

from __future__ import annotations

from typing import Any

from card.cli.help import command
from card.cli.options import json_option, kernels_option, wide_option
from card.cli.starting import run


@command(short_help="List known pairs.")
@json_option
@wide_option
def pairs(as_json: bool, wide: bool) -> int:
    """List targets on the hub with a known draft model; without --draft they use it."""
    return run("card.cli.pairs.run", "", as_json=as_json, wide=wide)


@command(short_help="List decoding methods.")
@json_option
def methods(as_json: bool) -> int:
    """List the decoding methods that run here, and the origin of each."""
    return run("card.cli.methods.run", "", as_json=as_json)


@command("verify-machine", short_help="Check that exact passes give the same results here as elsewhere.")
@kernels_option
@json_option
def verify_machine(**options: Any) -> int:
    """Compare a digest of products and logits with the one on record; exit status 1 if they differ."""
    return run("card.cli.verify_machine.run", **options)
