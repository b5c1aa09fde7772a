"""`card record`: what a pair of models writes and thinks likely on some prompts, for `card plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from card.bench.datasets import parse_spec, read_datasets
from card.cli.options import command_line, resolve_models, take_sampling_params
from card.cli.starting import spinner
from card.models.loading import load_tokenizer
from card.planner.recorder import RecordRequest
from card.planner.recorder import record as record_pair
from card.planner.recording import save_recording


def run(
    out: Path,
    target: str | None,
    draft: str | None,
    data: tuple[str, ...],
    limit: int | None,
    raw: bool,
    **options: Any,
) -> None:
    """Do what `card record` was asked for."""
    params = take_sampling_params(options)
    target_name, draft_name = resolve_models({"target": target, "draft": draft}, needs_draft=True)
    assert draft_name is not None
    datasets = read_datasets([parse_spec(one) for one in data], limit=limit, is_raw=raw)
    tokenizer = load_tokenizer(target_name)
    prompts = [tuple(question.encode(tokenizer)) for dataset in datasets for question in dataset.questions]
    request = RecordRequest(
        target=target_name, draft=draft_name, prompts=prompts, params=params, command=command_line(), **options
    )
    with spinner(f"loading {target_name}") as say:
        recording = record_pair(request, say)
    save_recording(recording, out)
    click.echo(
        f"{len(recording.texts)} texts of {recording.num_tokens} tokens; the drafter's first choice is right at "
        f"{recording.agreement():.0%} of them; written to {out} ({out.stat().st_size / 1e6:.1f} MB)"
    )
