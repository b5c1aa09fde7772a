"""Where does the time to the first token go? Prompts of several lengths, by kind of work, beside the machine's peaks.

    python benchmarks/engine/prompt.py --target TARGET.gguf --out prompt.jsonl

Prompts are random tokens; `card.LLM` reads each and writes one token, without a draft model. Shares are of the
processor's time, all threads together, by samples (`code_samples.py`). A kind's rate is the work that the model's shape
asks for over its share of that time; the peak beside it is what this machine was measured to do at most
(`machine_peaks.py`). A table of percent: of the time, and in brackets of the peak.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
from code_samples import SUFFIX, Code, Sampler, named_code
from machine_peaks import Peaks, measure_peaks
from pages import markdown

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import BenchError, CardError
from card.kernels.float_linear import FLOAT_PRODUCTS
from card.kernels.formats import BLOCK_FORMATS
from card.machine.processor import kernel_kind
from card.models.layer_kinds import layer_windows
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.layers import BlockWeight, Linear
from card.tools.bench.environment import allowed_cores

_LENGTHS = [90, 512, 2048, 8192]
_SECONDS = 5.0  # of the processor for prompts of one length, whose shares 500 samples then tell to two percent
_PRODUCTS, _ATTENTION, _ROW_WORK, _WAITING, _PYTHON = (
    "products", "attention", "norms and quantising", "waiting at barriers", "Python and system",
)  # fmt: skip
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_KERNELS = "card.kernels.jit."
_BYTE = "byte"  # the format of our own 8-bit weights
_FORMATS = {_BYTE, *FLOAT_PRODUCTS.values(), *(form.product for form in BLOCK_FORMATS.values())}


def kind_of(name: str) -> str:
    """Return the kind of work of a function of machine code; of any other code for an empty name."""
    entry = name.removesuffix(SUFFIX).removesuffix("_expander").removesuffix("_expanded")
    if entry in _FORMATS:
        return f"{_PRODUCTS}, {entry}"
    if name == "sched_yield" or name.endswith(".wait") or name.startswith("team_"):
        return _WAITING
    if name.startswith(f"{_KERNELS}attention"):
        return _ATTENTION
    return _ROW_WORK if name else _PYTHON


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a prompt asks for."""

    mads: Mapping[str, float]  # multiply-adds of linear layers, by format
    attention_mads: float
    row_bytes: float  # that linear layers take and give, a byte and four for each number


def work_of(model: DecoderModel, num_tokens: int) -> Work:
    """Return what a prompt of so many tokens asks of a model, its head for the last one alone.

    Raises: BenchError for a model with experts, or with layers that have no attention.
    """
    mads, row_bytes, attention_mads = Counter[str](), 0.0, 0.0
    for layer, window in zip(model.layers, layer_windows(model.config, num_tokens), strict=True):
        shape = layer.shape
        if shape.experts is not None or shape.mixer != "attention":
            raise BenchError("only models with attention and a plain MLP in each layer are counted")
        for linear in layer.linears.values():
            mads[format_of(model, linear)] += num_tokens * linear.weight.size
            row_bytes += num_tokens * sum(width * size for width, size in zip(linear.weight.shape, (4, 1), strict=True))
        seen = sum(min(position + 1, window or num_tokens) for position in range(num_tokens))
        attention_mads += 2 * shape.num_heads * shape.head_size * seen
    mads[format_of(model, model.lm_head)] += model.lm_head.weight.size
    return Work(mads=mads, attention_mads=attention_mads, row_bytes=row_bytes)


def format_of(model: DecoderModel, linear: Linear) -> str:
    """Return the format that a linear layer is multiplied in."""
    if isinstance(linear.weight, BlockWeight):
        return linear.weight.form.product
    return _BYTE if is_int8(model) else FLOAT_PRODUCTS[linear.weight.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How prompts of one length were read."""

    tokens: int
    repeats: int
    wall_s: float  # of each
    cpu_s: float
    samples: Mapping[str, int]  # by kind of work


def read_prompts(llm: LLM, num_tokens: int, seconds: float, sampler: Sampler, codes: Sequence[Code]) -> Reading:
    """Read prompts of so many tokens, for so many seconds of the processor or more."""
    numbers, most, repeats = random.Random(num_tokens), len(llm.tokenizer), 0
    begin, cpu_begin = time.perf_counter(), time.process_time()
    with sampler.sampling():
        while time.process_time() - cpu_begin < seconds:
            llm.generate([[numbers.randrange(most) for _ in range(num_tokens)]], _ONE_TOKEN)
            repeats += 1
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    samples = Counter[str]()
    for name, count in sampler.counts(codes).items():
        samples[kind_of(name)] += count
    return Reading(tokens=num_tokens, repeats=repeats, wall_s=wall_s / repeats, cpu_s=cpu_s / repeats, samples=samples)


def figures_of(reading: Reading, work: Work, peaks: Peaks, num_threads: int) -> dict[str, dict[str, float]]:
    """Return for each kind of work its share of the time; where work is counted its rate a thread, and of the peak."""
    of_byte, of_float, of_memory = (
        peak / num_threads for peak in (peaks.byte_mads, peaks.float_mads, peaks.memory_bytes)
    )
    counted = {_ATTENTION: (work.attention_mads, of_float), _ROW_WORK: (work.row_bytes, of_memory)}
    for form, mads in work.mads.items():
        counted[f"{_PRODUCTS}, {form}"] = mads, of_float if form in FLOAT_PRODUCTS.values() else of_byte
    found, total = {}, sum(reading.samples.values())
    for kind, count in sorted(reading.samples.items(), key=lambda one: -one[1]):
        found[kind] = {"share": count / total}
        if kind in counted:
            amount, peak = counted[kind]
            rate = amount / (reading.cpu_s * count / total)
            found[kind] |= {"per_s": rate, "of_peak": rate / peak}
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the shares of all lengths: of the time, and of the peak in brackets."""
    kinds = dict.fromkeys(kind for line in reversed(lines) for kind in line["kinds"])
    rows = [["rows a second", *(f"{line['tokens'] / line['wall_s']:.0f}" for line in lines)]]
    for kind in kinds:
        found = [line["kinds"].get(kind, {"share": 0.0}) for line in lines]
        of_peaks = [f" ({100 * one['of_peak']:.0f})" if "of_peak" in one else "" for one in found]
        rows.append(
            [kind, *(f"{100 * one['share']:.0f}{of_peak}" for one, of_peak in zip(found, of_peaks, strict=True))]
        )
    return markdown(["% of the time (of the peak)", *(f"{line['tokens']:,} tokens" for line in lines)], rows)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each length. Raises: CardError."""
    sampler, facts = Sampler(), options.describe_run()
    with named_code() as codes:
        model = load_decoder(args.target, dtype=args.dtype)
        if not isinstance(model, DecoderModel):
            raise BenchError(f"{args.target} does not run in our own pass; give another model")
        works = {count: work_of(model, count) for count in args.tokens}
        settings = {"method": "vanilla", "threads": args.threads, "max_model_len": max(args.tokens) + 1}
        with LLM(model, tokenizer=args.target, **settings) as llm:
            llm.generate([[0] * min(args.tokens)], _ONE_TOKEN)  # the first pass touches the memory of the weights
            readings = [read_prompts(llm, count, args.seconds, sampler, codes) for count in args.tokens]
    peaks = measure_peaks(args.threads)
    about = {"benchmark": "prompt", "model": Path(args.target).name, "dtype": args.dtype, "kernels": kernel_kind()}
    return [
        {
            **about,
            "threads": args.threads,
            "tokens": one.tokens,
            "repeats": one.repeats,
            "wall_s": one.wall_s,
            "cpu_s": one.cpu_s,
            "samples": sum(one.samples.values()),
            "kinds": figures_of(one, works[one.tokens], peaks, args.threads),
            "peaks_per_s": asdict(peaks),
            **facts,
        }
        for one in readings
    ]


def main() -> int:
    """Measure, print and keep what the command line asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target", help="folder, GGUF file or name [%(default)s]")
    parser.add_argument("--dtype", default="auto", help="auto, int8, bfloat16, ... [%(default)s]")
    parser.add_argument("--tokens", type=options.numbers, default=_LENGTHS, help="lengths [90,512,2048,8192]")
    parser.add_argument("--threads", type=int, default=len(allowed_cores()), help="[one a core]")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS, help="of the processor for each length, at least [%(default)s]"
    )
    parser.add_argument("--out", type=Path, help="file to append a line of JSON for each length to")
    args = parser.parse_args()
    try:
        lines = measure(args)
    except CardError as error:
        print(f"prompt.py: error: {error}", file=sys.stderr)
        return 2
    print(table(lines))
    if args.out:
        options.append_lines(args.out, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
