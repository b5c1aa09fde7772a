"""How fast is each decoding method on the same weights, dtype and prompts, in one run?

    python benchmarks/methods.py --prompts gsm8k=gsm8k_test.jsonl --workload all --limit 12 --max-tokens 128 \
        --target-cost 90M --out benchmarks/results/methods.jsonl

Every method decodes every prompt, one method after the other, before the next prompt comes: what drifts on the machine
hits all alike. Texts are compared with plain decoding before any time is shown. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import environment
import report
import workloads
from compare import TextJudge, TokenIds
from lineup import (
    BASELINE,
    BASELINE_ALL_CORES,
    COUPLED,
    KNOWN,
    PRESETS,
    SEVERAL_WRITERS,
    SINGLE_WRITERS,
    UNCOUPLED,
    Lineup,
    PromptIds,
    names_of,
)
from rich.console import Console
from rich.progress import Progress
from rows import Decoded, Row
from transformers.utils import logging as transformers_logging

from card import SamplingParams
from card.errors import CardError, SettingsError


@dataclass(frozen=True, slots=True)
class Cell:
    """All rows on one prompt, once: either all of them are there or the cell is dropped."""

    repeat: int
    prompt_idx: int
    decoded: dict[str, Decoded]  # by row


def measure(
    rows: Sequence[Row], prompts: PromptIds, params: SamplingParams, repeats: int, console: Console
) -> list[Cell]:
    """Return the finished cells: repeat by repeat, prompt by prompt, all rows in turn. Ctrl-C keeps what is done."""
    cells: list[Cell] = []
    jobs = list(itertools.product(range(repeats), range(len(prompts))))
    with Progress(console=console, transient=True, auto_refresh=False) as progress:  # no thread beside the decoding
        task = progress.add_task("decoding", total=len(jobs) * len(rows))
        try:
            for repeat, prompt_idx in jobs:
                decoded: dict[str, Decoded] = {}
                for row in rows:
                    what = f"repeat {repeat + 1}, prompt {prompt_idx + 1}, {row.name}"
                    progress.update(task, description=what, refresh=True)
                    decoded[row.name] = row.decode(prompts[prompt_idx], params)
                    progress.advance(task)
                cells.append(Cell(repeat, prompt_idx, decoded))
        except KeyboardInterrupt:
            console.print(f"interrupted: {len(cells)} of {len(jobs)} rounds over all methods are done")
    return whole_repeats(cells, len(prompts))


def whole_repeats(cells: list[Cell], num_prompts: int) -> list[Cell]:
    """Drop the last repeat if it lacks prompts, unless it is the only one."""
    num_whole = len(cells) // num_prompts
    return [cell for cell in cells if cell.repeat < num_whole] if num_whole else cells


def make_lines(rows: Sequence[Row], cells: list[Cell], prompts: PromptIds, judge: TextJudge) -> list[dict[str, Any]]:
    """Return one result per row. Texts are compared before any figure is made of the times."""
    differences = {}
    for row in rows:
        pairs: list[tuple[int, TokenIds, TokenIds]] = [
            (c.prompt_idx, c.decoded[row.name].token_ids, c.decoded[BASELINE].token_ids) for c in cells
        ]
        differences[row.name] = judge.first_differences(prompts, pairs) if row.is_comparable else None
    runs = {row.name: by_repeat(cells, row.name) for row in rows}
    return [
        {
            "benchmark": "methods",
            "method": row.name,
            **report.comparison_fields(differences[row.name]),
            **report.speed_fields(runs[row.name]),
            "speedup_same_core": ratio(runs[row.name], runs[BASELINE]),
            "speedup_all_cores": _ratio_if_run(runs, row.name, BASELINE_ALL_CORES),
            "vs_single_writers": _vs_single_writers(runs) if row.name == SEVERAL_WRITERS else None,
            **report.cost_fields(list(itertools.chain(*runs[row.name]))),
            "settings": dict(row.settings),
        }
        for row in rows
    ]


def _ratio_if_run(runs: Mapping[str, list[list[Decoded]]], name: str, baseline: str) -> float | None:
    return ratio(runs[name], runs[baseline]) if baseline in runs else None


def _vs_single_writers(runs: Mapping[str, list[list[Decoded]]]) -> dict[str, float]:
    """Return how fast several writers together are against each of them alone: below 1 they are in each other's way."""
    return {name: ratio(runs[SEVERAL_WRITERS], runs[name]) for name in SINGLE_WRITERS if name in runs}


def by_repeat(cells: list[Cell], name: str) -> list[list[Decoded]]:
    """Return a row's runs, one list per repeat."""
    return [[c.decoded[name] for c in group] for _, group in itertools.groupby(cells, lambda cell: cell.repeat)]


def ratio(runs: list[list[Decoded]], baseline: list[list[Decoded]]) -> float:
    """Return the median over repeats of the speed against the baseline's in the same repeat."""
    rates = zip(map(report.tokens_per_s, runs), map(report.tokens_per_s, baseline), strict=True)
    return round(statistics.median(own / plain if plain else 0.0 for own, plain in rates), 3)


def decode_all(
    args: argparse.Namespace, lineup: Lineup, prompts_of: Mapping[str, PromptIds], console: Console
) -> Iterator[list[dict[str, Any]]]:
    """Yield the results of each workload, one after the other; Ctrl-C ends with what is done of the present one."""
    judge = TextJudge(lineup.target, lineup.params)
    for name, prompts in prompts_of.items():
        console.print(f"workload {name}: {len(prompts)} prompts")
        rows = lineup.make_rows(args.methods, prompts)
        cells = measure(rows, prompts, lineup.params, args.repeats, console)
        if cells:
            facts = {
                "workload": name,
                "dtype": str(lineup.target.dtype).removeprefix("torch."),
                "target": args.target,
                "draft": args.draft,
                "target_cost": lineup.target_cost,
                "temperature": args.temperature,
                "seed": args.seed,
                "num_prompts": len({cell.prompt_idx for cell in cells}),
                "repeats": len({cell.repeat for cell in cells}),
                "max_tokens": args.max_tokens,
                "stop": "an end token, or max_tokens",
            }
            yield [{**line, **facts} for line in make_lines(rows, cells, prompts, judge)]
        if len(cells) < args.repeats * len(prompts):
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 1 if a text differs from plain decoding other than at a near-tie."""
    args = parse_arguments(argv)
    console = Console(stderr=True)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run = environment.describe_run()
    results: list[list[dict[str, Any]]] = []
    with contextlib.ExitStack() as stack:
        lineup = Lineup(args, console)
        stack.callback(lineup.close)
        prompts_of = {
            name: environment.encode_questions(file, args.limit, lineup.tokenizer)
            for name, file in args.workloads.items()
        }
        for lines in decode_all(args, lineup, prompts_of, console):
            results.append([{**line, **run} for line in lines])
            environment.append_lines(args.out, results[-1])
    for lines in results:
        Console().print(report.rich_table(lines))
    is_sound = all(line["differences_are_near_ties"] is not False for lines in results for line in lines)
    return int(not results or not is_sound)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    workloads.add_workload_options(parser)
    environment.add_common_options(parser, has_prompts=False)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and method (default: %(default)s)")
    parser.add_argument(
        "--sps-lengths", type=environment.numbers, default=[2, 3, 4, 5, 6, 8, 10, 12], help="to choose from"
    )
    for name, kind in report.DRAFT_OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="of card, fixed (default: the library's)")
    parser.add_argument(
        "--hrad", default="auto", help="predictor of specbranch: a file, off, or auto: the demo pair's for that pair"
    )
    parser.add_argument(
        "--methods", default="all", help=f"presets ({','.join(PRESETS)}) or rows ({','.join(KNOWN)}) (default: all)"
    )
    parser.add_argument("--coupling-report", action="store_true", help="add rows without coupled noise")
    args = parser.parse_args(argv)
    args.workloads = workloads.find_workloads(args)
    args.methods = names_of(args.methods.split(","))
    if args.coupling_report:
        if args.temperature == 0:
            raise SettingsError("--coupling-report needs a temperature above 0, got 0; add --temperature 1")
        args.methods = names_of([*args.methods, *(name + UNCOUPLED for name in COUPLED if name in args.methods)])
    if min(args.repeats, args.limit, args.max_tokens - 1, *args.sps_lengths) < 1:
        raise SettingsError("--repeats, --limit and --sps-lengths must be 1 or more, --max-tokens 2 or more")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"methods.py: error: {error}")
