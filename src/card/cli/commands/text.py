"""`card generate`, and the options of `card chat` and `card demo`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from card.cli.loops import without_loops
from card.cli.parts.chosen_models import make_llm
from card.cli.parts.command import command
from card.cli.parts.files import OutputPath, writing
from card.cli.parts.options import (
    draft_options,
    file_option,
    method_options,
    model_options,
    option_of,
    pop_sampling_params,
    rename_option,
    sampling_options,
    wide_option,
)
from card.cli.parts.remarks import demo_note, remark
from card.cli.parts.starting import ReadingSpinner, load, run, spinner, tell
from card.cli.prompt_input import read_prompt
from card.config import SamplingParams
from card.errors import PromptError, SettingsError
from card.models.demo import DEMO_PROBLEMS

if TYPE_CHECKING:  # loaded by make_llm
    from card.api.llm import LLM, StreamChunk

system_option = click.option("--system", help="System prompt.")


@command(short_help="Continue or answer a prompt.")
@click.argument("prompt", required=False)
@file_option("--prompt-file", words="File with the prompt, UTF-8.")
@system_option
@file_option("--image", "images", words="Image to show.", multiple=True)
@click.option("--raw", is_flag=True, help="Use no chat template.")
@click.option("--stats", is_flag=True, help="Print the costs to standard error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option("--trace", "trace_file", type=OutputPath(), help="Write a trace for ui.perfetto.dev.")
@method_options
@sampling_options
@draft_options
@model_options
def generate(
    prompt: str | None,
    prompt_file: Path | None,
    system: str | None,
    images: tuple[Path, ...],
    raw: bool,
    stats: bool,
    as_json: bool,
    trace_file: Path | None,
    **options: Any,
) -> None:
    """Answer PROMPT; the text streams to standard output.

    Piped text follows PROMPT and a blank line; it is the prompt if there is no other, or if PROMPT is "-". Images come
    before the prompt, in their order.
    """
    params = pop_sampling_params(options)  # first: a schema may be on standard input
    text = read_prompt(prompt, prompt_file)
    if not text:
        raise PromptError("the prompt is empty; give at least one character")
    if raw and system:
        raise SettingsError("--system needs the chat template; leave out --raw")
    with make_llm(options | _seeing(images, raw)) as llm:
        if note := demo_note(llm.settings.target):
            tell(note)
        with llm.trace() if trace_file else nullcontext() as trace:
            reading = ReadingSpinner("reading the prompt")
            asked = text if raw else [*system_turn(system), _turn(text, images)]
            stream = llm.stream(asked, params, tell_read=reading.tell_read)
            if not as_json:
                chunks = _show(without_loops(reading.until_first(stream), llm, params))
            else:
                with spinner("answering"):
                    chunks = list(stream)
        if trace_file and trace:
            about = {"method": llm.method.name, "target": llm.settings.target, "target_cost": llm.target_cost or ""}
            with writing(trace_file) as place, place.open("w", encoding="utf-8") as file:
                load("card.engine.trace").write_trace(file, {llm.method.name: trace}, about)
        if as_json:
            click.echo(json.dumps(_result(llm, chunks), ensure_ascii=False))
        elif stats or llm.target_cost:
            line = load("card.cli.parts.stats_line", "").stats_line(llm.method.name, chunks[-1].stats, llm.target_cost)
            click.echo(line, err=True)
        remark(llm, params, chunks[-1].stats.num_new_tokens, chunks[-1].finish_reason)


def _seeing(images: Sequence[Path], raw: bool) -> dict[str, Any]:
    """Return the settings that allow these images. Raises: SettingsError for a raw prompt with images."""
    if images and raw:
        raise SettingsError("--image needs the chat template, which places images; leave out --raw")
    return {"max_images": len(images), "image_dir": Path.cwd().anchor} if images else {}


def system_turn(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the first turn of the user: the system prompt, if there is one."""
    return [{"role": "system", "content": system}] if system else []


def _turn(text: str, images: Sequence[Path]) -> dict[str, Any]:
    if not images:
        return {"role": "user", "content": text}
    shown = [{"type": "image", "image": str(path.absolute())} for path in images]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


def _show(stream: Iterator[StreamChunk]) -> list[StreamChunk]:
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        click.echo(chunk.text, nl=False)
        sys.stdout.flush()
    click.echo()
    return chunks


def _result(llm: LLM, chunks: list[StreamChunk]) -> dict[str, Any]:
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason,
        "method": llm.method.name,
        "exact": llm.is_exact,
        "target_cost": llm.target_cost,
        "stats": chunks[-1].stats.as_dict(),
    }


# ---- chat and demo ---------------------------------------------------------------------------------------------------


@command(short_help="Talk with the target model.")
@click.argument("model", required=False)
@system_option
@click.option("--stats", is_flag=True, help="Print the costs to standard error.")
@method_options
@sampling_options
@draft_options
@model_options
def chat(**options: Any) -> int:
    """Talk with MODEL, which is the same as --target: a folder, a GGUF file, a hub name, or demo-target.

    /help lists the commands. /quit or Ctrl-D ends it, Ctrl-C cuts an answer short.
    """
    rename_option(options, "model", "target")
    return run("card.cli.chat.run", "", **options)


@command(short_help="Watch the methods side by side on the built-in pair.")
@click.option(
    "--problems", type=int, default=3, show_default=True, help=f"How many problems, at most {len(DEMO_PROBLEMS)}."
)
@option_of(SamplingParams, "max_tokens", default=128, help="Most new tokens per problem.")
@option_of(SamplingParams, "temperature", default=0.0)
@option_of(SamplingParams, "seed", default=0)
@wide_option
@model_options
def demo(**options: Any) -> int:
    """Answer a few problems with plain decoding, sequential speculation and CARD, and compare text and speed."""
    return run("card.cli.demo.run", **options)
