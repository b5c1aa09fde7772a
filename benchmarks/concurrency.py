"""How do throughput and latency grow with the number of requests at once, and does the tuned policy find the best way?

    python benchmarks/concurrency.py --prompts gsm8k_test.jsonl

A closed loop keeps 1, 2, 4, 8 and 16 requests in flight on the same cores: plain decoding, sequential speculation, CARD
with fixed settings, and CARD as it tunes itself. Texts are compared with plain decoding of one request at a time before
any time is shown. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import load_report
import options
from closed_loop import ClosedLoop, Load
from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging as transformers_logging

from card import SamplingParams
from card.api.asked import Asked
from card.api.host import Host
from card.assembly.plan import readable
from card.config import DraftSettings
from card.errors import CardError, SettingsError
from card.machine.threads import CoreSet, pinned
from card.models.loading import load_tokenizer
from card.theirs.transformers.loading import load_model
from card.tools.bench.compare import TextJudge
from card.tools.bench.environment import MEASURED_START
from card.tools.bench.rows import SETTLE_S

FAMILIES = ("vanilla", "sps", "beside", "turns", "card")
_METHODS = {"beside": "card", "turns": "card"}  # of the families that are not named after theirs
_PLACEMENTS = {"vanilla": "inline", "sps": "inline", "beside": "process", "turns": "inline"}
_WARM_UP_TOKENS = 16
_RESULTS = Path(__file__).parent / "results"

PromptIds = list[list[int]]
Runs = dict[str, list[Load]]  # by row; the first one of each, then those that count


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One line of the comparison: a family, which is an engine, and how it drafts."""

    name: str
    family: str
    draft: dict[str, Any] = field(default_factory=dict)  # changes to `DraftSettings`; all of them stand in the result


def row_specs(args: argparse.Namespace) -> list[RowSpec]:
    """Return the rows that were asked for; plain decoding always."""
    specs = [RowSpec("vanilla", "vanilla")]
    specs += [RowSpec(f"sps-{n}", "sps", {"num_speculative_tokens": n}) for n in args.sps_lengths]
    for width in args.beam_widths:
        for shape in ("chain", "tree"):
            specs.append(RowSpec(f"beside-{shape}-w{width}", "beside", {"verify": shape, "beam_width": width}))
        for n in args.turn_lengths:
            draft = {"verify": "tree", "beam_width": width, "num_speculative_tokens": n}
            specs.append(RowSpec(f"turns-{n}-w{width}", "turns", draft))
    specs.append(RowSpec("card", "card"))
    wanted = set(args.rows) if args.rows else set(FAMILIES)
    if unknown := wanted - set(FAMILIES) - {spec.name for spec in specs}:
        known = ", ".join(dict.fromkeys([*FAMILIES, *(spec.name for spec in specs)]))
        raise SettingsError(f"unknown row {min(unknown)!r}; known: {known}")
    return [spec for spec in specs if spec.name == "vanilla" or wanted & {spec.name, spec.family}]


class Row:
    """One row at work. Rows of one family share an engine."""

    def __init__(self, spec: RowSpec, loop: ClosedLoop, cores: tuple[int, ...]) -> None:
        host = loop.host
        self.name, self.family = spec.name, spec.family
        self._loop, self._cores = loop, cores
        self._draft = None if spec.family == "card" else host.method.shape(DraftSettings(**spec.draft))
        self.settings = {
            "method": host.method.name,
            "policy": host.settings.policy,
            "placement": host.settings.placement,
            "cores": list(cores),
            "threads": {"alone": host.plan.cores.alone.threads, "beside": host.plan.cores.beside.threads},
            "max_num_seqs": host.settings.max_num_seqs,
            "prefill_chunk": host.settings.prefill_chunk,
            **spec.draft,
        }

    def run(self, prompts: PromptIds, concurrency: int, params: SamplingParams) -> Load:
        """Answer all prompts, so many at a time."""
        host = self._loop.host
        if self._draft is not None:
            host.draft_settings = self._draft
        host.engine.forget_prefixes()  # prompts come back in every repeat
        with pinned(CoreSet(self._cores, host.settings.threads)):
            time.sleep(SETTLE_S)
            return self._loop.run(prompts, concurrency, params)


class Bench:
    """The models, loaded once, one engine per family, and the rows."""

    def __init__(self, args: argparse.Namespace, cores: tuple[int, ...], console: Console) -> None:
        self.args = args
        self.console = console
        self._stack = contextlib.ExitStack()
        self._loops: dict[str, ClosedLoop] = {}
        self.cores = cores
        self.tokenizer = load_tokenizer(args.target)
        self.target = options.load_target(args.target, args.dtype, args.target_cost)
        self._draft = load_model(args.draft, dtype=args.dtype)
        self.target_cost: str | None = None
        self.params = SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens).resolved()

    def close(self) -> None:
        """End the drafters."""
        self._stack.close()

    def make_rows(self, specs: Sequence[RowSpec]) -> list[Row]:
        """Return the rows; each engine is brought up once."""
        return [Row(spec, self._loop(spec.family), self.cores) for spec in specs]

    def warm_up(self, prompts: PromptIds, concurrency: int) -> None:
        """Let each engine run a few tokens at this concurrency: kernels are made at the first call of each size."""
        for loop in self._loops.values():
            loop.run(prompts[:concurrency], concurrency, self.params.replace(max_tokens=_WARM_UP_TOKENS))

    def _loop(self, family: str) -> ClosedLoop:
        if family not in self._loops:
            self.console.print(f"bringing up {family}")
            args, method = self.args, _METHODS.get(family, family)
            settings: dict[str, Any] = {
                "dtype": args.dtype,
                "max_num_seqs": max(args.concurrency),
                **MEASURED_START,
            }
            if family in _PLACEMENTS:
                settings |= {"policy": "fixed", "placement": _PLACEMENTS[family]}
                settings["threads"] = len(self.cores) - (family == "beside")  # the drafter has the last core there
            if family == "sps":
                settings["num_speculative_tokens"] = max(args.sps_lengths)
            elif family in ("beside", "turns"):
                settings["beam_width"] = max(args.beam_widths)
            draft = {"vanilla": None, "sps": self._draft, "turns": self._draft}.get(family, args.draft)
            host = Host(
                Asked(self.target, draft, tokenizer=self.tokenizer, method=method, settings=readable(settings, method))
            )
            self._stack.callback(host.close)
            self._loops[family] = ClosedLoop(host)
            self.target_cost = host.target_cost
        return self._loops[family]


def measure(
    rows: list[Row], prompts: PromptIds, concurrency: int, params: SamplingParams, args: argparse.Namespace
) -> tuple[Runs, bool]:
    """Return the runs of each row, and whether Ctrl-C ended them.

    All rows run once, one after the other, on half of the prompts; then the best of each kind, and those that have no
    rival of their kind, run on all of them, so often that there are ``args.repeats`` runs. The last round over the rows
    is dropped if it was interrupted.
    """
    runs: Runs = {}
    chooses = args.repeats > 1 and args.finalists > 0
    half = prompts[: max(concurrency, math.ceil(len(prompts) / 2))]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, auto_refresh=False) as progress:  # no thread beside the decoding
        task = progress.add_task("", total=None)
        for repeat in range(args.repeats):
            done: dict[str, Load] = {}
            try:
                for row in rows:
                    what = f"concurrency {concurrency}, repeat {repeat + 1}, {row.name}"
                    progress.update(task, description=what, refresh=True)
                    done[row.name] = row.run(half if chooses and repeat == 0 else prompts, concurrency, params)
            except KeyboardInterrupt:
                return runs, True
            for name, load in done.items():
                runs.setdefault(name, []).append(load)
            if repeat == 0 and chooses:
                kinds = {row.name: load_report.kind_of(row.family) for row in rows}
                finalists = load_report.best_of_each_kind(kinds, runs, args.finalists)
                rows = [row for row in rows if row.name in finalists]
    return runs, False


def make_lines(
    rows: list[Row],
    runs: Runs,
    plain: list[load_report.TokenIds],
    prompts: PromptIds,
    concurrency: int,
    judge: TextJudge,
) -> list[dict[str, Any]]:
    """Return one result per row and their summary. Texts are compared before any figure is made of the times."""
    differences = {}
    for row in rows:
        pairs = [(i, one.token_ids, plain[i]) for load in runs[row.name] for i, one in enumerate(load.served)]
        differences[row.name] = load_report.first_differences(judge, prompts, pairs)
    lines = [
        {
            "benchmark": "concurrency",
            "kind": "row",
            "row": row.name,
            "family": row.family,
            "concurrency": concurrency,
            "num_prompts": len(load_report.counting(runs[row.name])[0].served),
            **load_report.comparison_fields(differences[row.name]),
            **load_report.load_fields(runs[row.name]),
            "speedup_vanilla": load_report.ratio(runs[row.name], runs["vanilla"]),
            "settings": row.settings,
        }
        for row in rows
    ]
    return [*lines, load_report.summary({row.name: row.family for row in rows}, runs, concurrency, lines)]


def run_all(bench: Bench, rows: list[Row], prompts: PromptIds, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of all concurrencies; those of each are written and shown as soon as they are there."""
    args = bench.args
    counts = {c: min(len(prompts), max(args.requests_per_slot * c, args.least_requests)) for c in args.concurrency}
    bench.console.print("decoding every prompt plainly, one at a time, for the texts")
    plain = [one.token_ids for one in rows[0].run(prompts[: max(counts.values())], 1, bench.params).served]
    judge = TextJudge(bench.target, bench.params)
    all_lines: list[dict[str, Any]] = []
    for concurrency, count in counts.items():
        bench.warm_up(prompts, concurrency)
        runs, is_interrupted = measure(rows, prompts[:count], concurrency, bench.params, args)
        if runs:
            lines = make_lines(rows, runs, plain, prompts[:count], concurrency, judge)
            lines = [{**line, **facts} for line in lines]
            options.append_lines(args.out, lines)
            all_lines += lines
            Console().print(load_report.rich_table(lines))
        if is_interrupted:
            bench.console.print(f"interrupted at concurrency {concurrency}")
            break
    return all_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 1 if a text differs from plain decoding other than at a near-tie."""
    args = parse_arguments(argv)
    specs = row_specs(args)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    run = options.describe_run()
    cores = options.all_cores(args.cores)
    with pinned(CoreSet(cores)), contextlib.ExitStack() as stack:  # drafters and torch's threads stay there too
        bench = Bench(args, cores, Console(stderr=True))
        stack.callback(bench.close)
        prompts = options.encode_prompts(args.prompts, args.limit, bench.tokenizer)
        if len(prompts) < max(args.concurrency):
            raise SettingsError(
                f"concurrency {max(args.concurrency)} needs as many prompts, got {len(prompts)}; raise --limit, or "
                "give a longer file"
            )
        rows = bench.make_rows(specs)
        facts = {
            "dtype": str(bench.target.dtype).removeprefix("torch."),
            "target": args.target,
            "draft": args.draft,
            "target_cost": bench.target_cost,
            "temperature": 0.0,
            "seed": 0,
            "repeats": args.repeats,
            "max_tokens": args.max_tokens,
            "stop": "an end token, or max_tokens",
            **run,
        }
        lines = run_all(bench, rows, prompts, facts)
    if lines:
        Console().print(load_report.rich_summary(lines))
    return int(not lines or any(line.get("differences_are_near_ties") is False for line in lines))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_model_options(parser)
    numbers = options.numbers
    parser.add_argument("--target-cost", default="90M", help="price of the target; 0: as it is (default: %(default)s)")
    parser.add_argument("--cores", help="cores that all methods share, such as 0,1 (default: all)")
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16], help="requests in flight, such as 1,4")
    parser.add_argument("--limit", type=int, default=48, help="most prompts (default: %(default)s)")
    parser.add_argument(
        "--requests-per-slot", type=int, default=2, help="requests of a run over concurrency (default: %(default)s)"
    )
    parser.add_argument("--least-requests", type=int, default=8, help="of a run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default: %(default)s)")
    parser.add_argument(
        "--finalists",
        type=int,
        default=2,
        help="rows of sps and of card's fixed settings that go on after the first run; 0: all (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), help=f"families ({','.join(FAMILIES)}) or rows (default: all)"
    )
    parser.add_argument("--sps-lengths", type=numbers, default=[1, 2, 3, 4, 6, 8], help="draft lengths of sps")
    parser.add_argument("--turn-lengths", type=numbers, default=[1, 2, 4, 6, 8], help="draft lengths of card in turns")
    parser.add_argument("--beam-widths", type=numbers, default=[2, 6], help="of card with fixed settings")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to it (default: concurrency_COST.jsonl)")
    args = parser.parse_args(argv)
    args.target_cost = None if args.target_cost == "0" else args.target_cost
    counts = [args.limit, args.requests_per_slot, args.least_requests, args.repeats, args.max_tokens - 1]
    if min(*counts, *args.concurrency, *args.sps_lengths, *args.turn_lengths, *args.beam_widths) < 1:
        raise SettingsError("numbers must be 1 or more, --max-tokens 2 or more")
    args.out = args.out or _RESULTS / f"concurrency_{args.target_cost or 'as_is'}.jsonl"
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"concurrency.py: error: {error}")
