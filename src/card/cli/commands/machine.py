"""The options of the commands about methods, pairs and this machine."""

from __future__ import annotations

from typing import Any

import click

from card.cli.parts.command import command
from card.cli.parts.options import json_option, kernels_option, option_of, wide_option
from card.cli.parts.starting import run
from card.config import EngineSettings


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


@command(short_help="List or clear kept weights.")
@click.argument("model", required=False)
@click.option("--clear", is_flag=True, help="Remove them.")
@option_of(EngineSettings, "cache_dir")
@json_option
def cache(**options: Any) -> int:
    """List what is kept of GGUF files and of folders in MXFP4, as passes read it: of MODEL, or of all.

    A model that runs while its copy is removed goes on; its next start packs the file once more.
    """
    return run("card.cli.kept_models.run", "", **options)


@command("verify-machine", short_help="Check that exact passes give the same results here as elsewhere.")
@kernels_option
@json_option
def verify_machine(**options: Any) -> int:
    """Compare a digest of products and logits with the one on record; exit status 1 if they differ."""
    return run("card.cli.verify_machine.run", **options)
