"""`card record`: what a pair of models writes and thinks likely on some prompts, for `card plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from card.bench.datasets import parse_spec, read_datasets
from card.cli.options import resolve_models, sampling_options, take_sampling_params
from card.cli.outputs import OutputPath
from card.models.loading import load_tokenizer
from card.planner.recorder import RecordRequest
from card.planner.recorder import record as record_pair
from card.planner.recording import save_recording


@click.command(short_help="Record how a pair of models behaves, for plans.")
@click.option("--out", type=OutputPath(), required=True, help="File to write.")
@click.option("--target", help="Target model: a folder, a hub name, or demo-target.  [default: demo-target]")
@click.option("--draft", help="Draft model: the same, or demo-draft, the default beside demo-target.")
@click.option(
    "--data",
    multiple=True,
    default=("questions",),
    show_default=True,
    help="Prompts: shipped ones by name, a file, or NAME=FILE for a published format; as for card bench.",
)
@click.option("--limit", type=click.IntRange(1), help="Most prompts of each data set.  [default: all]")
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without the model's chat template.")
@click.option(
    "--dtype", default="auto", show_default=True, help="auto (as stored), float32, bfloat16, float16, float64."
)
@click.option("--device", default="cpu", show_default=True, help="Device of both models.")
@click.option(
    "--coupled-noise/--no-coupled-noise",
    default=True,
    show_default=True,
    help="Whether the drafter ranks candidates with the target's sampling noise.",
)
@sampling_options
def record(
    out: Path,
    target: str | None,
    draft: str | None,
    data: tuple[str, ...],
    limit: int | None,
    raw: bool,
    dtype: str,
    device: str,
    coupled_noise: bool,
    **options: Any,
) -> None:
    """Let the target answer prompts, and write down what target and draft model held likely at each position."""
    params = take_sampling_params(options)
    target_name, draft_name = resolve_models({"target": target, "draft": draft}, needs_draft=True)
    assert draft_name is not None
    datasets = read_datasets([parse_spec(one) for one in data], limit=limit, is_raw=raw)
    tokenizer = load_tokenizer(target_name)
    prompts = [tuple(question.encode(tokenizer)) for dataset in datasets for question in dataset.questions]
    request = RecordRequest(
        target=target_name,
        draft=draft_name,
        prompts=prompts,
        params=params,
        dtype=dtype,
        device=device,
        coupled_noise=coupled_noise,
        command=" ".join(["card", *sys.argv[1:]]),
    )
    with Console(stderr=True).status("") as status:
        recording = record_pair(request, status.update)
    save_recording(recording, out)
    click.echo(
        f"{len(recording.texts)} texts of {recording.num_tokens} tokens; the drafter's first choice is right at "
        f"{recording.agreement():.0%} of them; written to {out} ({out.stat().st_size / 1e6:.1f} MB)"
    )
