"""The options of the commands about a pair of models: check-pair, choose-examples, record and train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from card.cli.files import OutputPath
from card.cli.help import CardGroup, command
from card.cli.options import (
    LEAST_CHECKED_TOKENS,
    MOST_RECORDED_TOKENS,
    F,
    counted,
    file_option,
    json_option,
    kernels_option,
    neutral_options,
    option_of,
    options_of,
    pair_options,
    parse_names,
    wide_option,
    with_options,
)
from card.cli.starting import run
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.family.ctc.names import LOSSES


@command("check-pair", short_help="Measure whether a draft model is worth its while.")
@click.argument("target", required=False)
@click.argument("draft", required=False)
@file_option("--prompts", words="Sample prompts, one per line.  [default: word problems]")
@counted("--max-tokens", default=64, least=LEAST_CHECKED_TOKENS, words="Most new tokens per prompt.")
@json_option
@option_of(EngineSettings, "target_cost")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True)
@with_options(*options_of(EngineSettings, "draft_device max_model_len threads draft_threads cores draft_cores"))
@wide_option
def check_pair(**options: Any) -> int:
    """Measure whether DRAFT makes TARGET faster here; both are a folder, a GGUF file or a hub name,
    the built-in pair if left out.

    Exit status 0 for yes, 1 for no, 2 for an error.
    """
    return run("card.tools.check_pair.command.run", **options)


@command(short_help="List known pairs.")
@json_option
@wide_option
def pairs(as_json: bool, wide: bool) -> int:
    """List targets on the hub whose draft model is known: named without --draft, they bring it."""
    return run("card.cli.pairs.run", "", as_json=as_json, wide=wide)


@command(short_help="Record how a pair of models behaves, for plans.")
@click.option("--out", type=OutputPath(), required=True, help="File to write.")
@pair_options
@click.option(
    "--data",
    multiple=True,
    default=("questions",),
    show_default=True,
    help="Prompts, as for card bench.",
)
@counted("--limit", words="Prompts of each data set.  [default: all]")
@click.option("--raw", is_flag=True, help="Use no chat template.")
@option_of(EngineSettings, "dtype", is_filled=True)
@kernels_option
@option_of(EngineSettings, "device", is_filled=True)
@option_of(DraftSettings, "coupled_noise", is_filled=True, show_default=True)
@click.option("--methods", callback=parse_names, help="Such as sparsespec.")
@with_options(*options_of(EngineSettings, "ctc kv_selection"))
@option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS)
@neutral_options
@option_of(SamplingParams, "seed")
@option_of(SamplingParams, "stop", multiple=True)
@option_of(SamplingParams, "ignore_eos", is_filled=True)
def record(**options: Any) -> int:
    """Let the target answer prompts, and write down what target and draft model held likely at each position."""
    return run("card.tools.planner.command.record", **options)


@command("choose-examples", short_help="Choose examples or instructions by the target's loss.")
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@file_option("--instructions", words="Choose one line instead.")
@counted("--shots", words="Examples.  [default: 2]")
@counted("--candidates", default=64, words="Sets drawn.")
@counted("--held-out", default=8, words="Judging problems.")
@click.option("--regret", is_flag=True, help="Measure the loss.")
@counted("--seed", default=0, least=0, words="Same seed, same sets.")
@counted("--threads", words="CPU threads.  [default: torch's choice]")
@pair_options
@with_options(*options_of(EngineSettings, "dtype device", is_filled=True))
@json_option
def choose_examples(**options: Any) -> int:
    """Choose the examples after which the target's loss on the held-out answers is lowest, among random sets.

    With --instructions an instruction is chosen, which stands before each question.

    The draft model scores all candidates, the target a probe and what the draft model's ranking leaves: the fewer, the
    better both rank the probe. The best one may be missed.
    """
    return run("card.labs.cascade.command.run", **options)


@click.group(cls=CardGroup, short_help="Train a small model that helps a pair.")
def train() -> None:
    """Train a small model that helps one pair of models."""


_TRAINING = with_options(
    pair_options,
    file_option(
        "--prompts",
        words="Prompts, one per line or JSON lines.  [default: word problems]",
    ),
    counted("--max-prompts", words="Most prompts."),
    click.option(
        "--out",
        required=True,
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="File to write.",
    ),
    option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS),
)


def _dtype(default: str, words: str) -> Callable[[F], F]:
    kinds = click.Choice(("auto", "float32", "bfloat16", "float16", "float64"))
    return click.option("--dtype", type=kinds, metavar="TEXT", default=default, show_default=True, help=words)


@train.command("hrad", short_help="Train H-RAD, which foresees rejections for method specbranch.")
@_TRAINING
@file_option(
    "--test-prompts",
    words="Prompts to judge by.  [default: a tenth of the prompts]",
)
@counted(
    "--num-speculative-tokens",
    "--gamma",
    default=4,
    words="Tokens drafted in a round.",
)
@counted("--layers", "num_layers", default=4, words="Last layers of the target.")
@counted("--epochs", default=20, words="Most passes over the data.")
@click.option(
    "--balance",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Weight of rare outcomes; 1: like common ones.",
)
@counted("--seed", default=0, least=0, words="Same seed, same predictor.")
@_dtype("auto", "auto (as stored), float32, bfloat16, float16, float64.")
@option_of(EngineSettings, "device", is_filled=True)
@counted("--threads", words="CPU threads.  [default: torch's choice]")
def hrad(**options: Any) -> int:
    """Train H-RAD: from the target's hidden states it foresees how much of a drafted chain will be accepted.

    The pair answers the prompts greedily by sequential speculation; every round is an example. The rounds of a tenth of
    the prompts say when to stop.
    """
    return run("card.family.specbranch.command.run", **options)


@train.command("judge", short_help="Train AutoJudge for --judge.")
@_TRAINING
@counted("--max-seconds", words="Seconds of mining.")
@_dtype("float32", "auto: as stored.")
@option_of(EngineSettings, "device", is_filled=True)
def judge(**options: Any) -> int:
    """Train AutoJudge: from the target's hidden state it says which mismatches change the answer's final number.

    The target answers the prompts greedily. Where the draft model would have written another token, the target goes on
    from that one, and the final numbers are compared. A training that was cut off, or out of --max-seconds, goes on if
    the same command is given again.
    """
    return run("card.family.judges.command.run", **options)


_HEAD = with_options(
    option_of(EngineSettings, "target"),
    counted("--max-prompts", words="Most prompts."),
    option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS),
    click.option("--out", required=True, type=OutputPath(), help="File to write."),
    counted("--seed", default=0, least=0, words="Same seed, same head."),
)


@train.command("ctc", short_help="Train a head that drafts from the target's states.")
@_HEAD
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@click.option("--loss", type=click.Choice(LOSSES), default="ctc", show_default=True, help="Loss.")
@counted("--epochs", default=2, words="Most passes over the data.")
def ctc(**options: Any) -> int:
    """Train a head that drafts from the target's hidden states, for --method ctc or --writers ctc.

    It learns the target's own greedy answers to the questions; the answers of the file are not read. By CTC a slot may
    stay blank; by cross-entropy each slot is one token ahead. A training that was cut off goes on if the same command
    is given again.
    """
    return run("card.family.ctc.command.run", **options)


@train.command("hivis", short_help="Train a drafter for a target that sees images.")
@_HEAD
@file_option("--data", words='JSON lines with "messages".', required=True)
@counted("--epochs", default=4, words="Most passes over the data.")
def hivis(**options: Any) -> int:
    """Train a drafter that reads text alone and the target's hidden states, for --method hivis or --writers hivis.

    The target answers the conversations greedily; they hold messages as of chat completions. Images are data URLs, or
    files below the folder of the data. A training that was cut off goes on if the same command is given again.
    """
    return run("card.family.hivis.command.run", **options)


@train.command("router", short_help="Train a router for --method arbitrage.")
@pair_options
@file_option("--data", words='JSON lines with "question" and "answer".', required=True)
@counted("--max-prompts", words="Most prompts.")
@click.option(
    "--out", required=True, type=click.Path(dir_okay=False, writable=True, path_type=Path), help="File to write."
)
@option_of(SamplingParams, "max_tokens", default=MOST_RECORDED_TOKENS)
@option_of(EngineSettings, "device", is_filled=True)
@counted("--seed", default=0, least=0, words="Same seed, same prompts.")
def router(**options: Any) -> int:
    """Train a router of steps: it foresees whether the target's step would be better than the draft model's.

    Both models write every step, and a checker compares their results with those of the answers, which are worked
    solutions in GSM8K's form. A training that was cut off goes on if the same command is given again.
    """
    return run("card.labs.steps.train_command.run", **options)


@train.command("pard", short_help="Adapt a draft model to draft several tokens a pass.")
@pair_options
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines with "question" and "answer".',
)
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write.")
@click.option("--target-features", is_flag=True, help="Read the target's states.")
@counted("--num-tokens", default=8, least=2, words="Tokens of a pass.")
@click.option(
    "--retention",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Masks kept.",
)
@click.option(
    "--least-retention",
    type=click.FloatRange(0, 1),
    default=0.2,
    show_default=True,
    help="Always.",
)
@click.option(
    "--learning-rate",
    type=float,
    help="Peak.  [default: by size]",
)
@counted("--epochs", default=1, words="Most passes over the data.")
@option_of(EngineSettings, "device", is_filled=True)
@counted("--seed", default=0, least=0, words="Same seed, same weights.")
def pard(**options: Any) -> int:
    """Adapt a draft model to draft several tokens a pass (PARD).

    With a target it learns the target's distributions, weighted by their chance to matter (PARD-2).
    The answers are learnt. Lines may also be JSON with "text", or plain text. A training that was cut off goes on if
    the same command is given again.
    """
    return run("card.family.pard.command.run", **options)
