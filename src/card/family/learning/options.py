"""The group `card train`, and options that its commands share."""

from __future__ import annotations

from collections.abc import Callable

import click

from card.cli.parts.files import OutputPath
from card.cli.parts.groups import CardGroup
from card.cli.parts.options import MOST_RECORDED_TOKENS, counted, file_option, option_of, pair_options, with_options
from card.cli.parts.sections import F, option
from card.config import EngineSettings, SamplingParams


@click.group(cls=CardGroup, short_help="Train a small model that helps a pair.", under="train")
def train() -> None:
    """Train a small model that helps one pair of models."""


training_options = with_options(
    pair_options,
    file_option("--prompts", words="Prompts, one per line or JSON lines.  [default: word problems]"),
    counted("--max-prompts", words="Most prompts."),
    click.option("--out", required=True, type=OutputPath(beside=(".mined.jsonl",)), help="File to write."),
    option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS),
)


def head_options(*, is_folder: bool = False) -> Callable[[F], F]:
    """Return the options of a training of a head, which is a file or a folder."""
    out = OutputPath(is_folder=is_folder, beside=(".texts", ".training"))
    return with_options(
        option_of(EngineSettings, "target"),
        counted("--max-prompts", words="Most prompts."),
        option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS),
        click.option("--out", required=True, type=out, help=f"{'Folder' if is_folder else 'File'} to write."),
        counted("--seed", default=0, least=0, words="Same seed, same head."),
    )


def dtype_option(default: str, words: str) -> Callable[[F], F]:
    """Return the option --dtype of a training, with its default and the words of its help."""
    kinds = click.Choice(("auto", "float32", "bfloat16", "float16", "float64"))
    return option(
        "--dtype", section="Models", type=kinds, metavar="TEXT", default=default, show_default=True, help=words
    )
