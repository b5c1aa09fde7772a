"""Make the README's Markdown tables from the JSON lines of the benchmarks.

python benchmarks/table.py methods.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import load_report
import validation_report
from packed import unpacked
from pages import markdown

from card.errors import BenchError
from card.tools.bench.records import Run
from card.tools.bench.results import load
from card.tools.bench.row_names import SEVERAL_WRITERS, SINGLE_WRITERS
from card.tools.bench.summary import RowSummary, ratio
from card.tools.bench.tables import cells, groups, shown


def is_bench_file(path: Path) -> bool:
    """Return whether `card bench` wrote a file, or a script here that measures as it does."""
    with path.open(encoding="utf-8") as file:
        return json.loads(file.readline()).get("kind") == "run"


def read_runs(path: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of a script's own file, run by run, in their order."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [list(run) for _, run in itertools.groupby(lines, lambda line: (line["started"], line["command"]))]


def bench_tables(run: Run, columns: Sequence[str] = ()) -> str:
    """Return a run as a table for each pair and workload; several are compared in one more, before them."""
    found = groups(run)
    if len(found) == 1:
        return bench_table(run, found[0], columns)
    tables = [f"Against {run.baseline}:", _ratios_table(found)]
    if writers := _writers_table(run, found):
        tables += ["Several writers at once, against each of them alone:", writers]
    for rows in found:
        tables += [
            f"{rows[0].pair}, {rows[0].workload}, {rows[0].num_prompts} prompts:",
            bench_table(run, rows, columns),
        ]
    return "\n\n".join(tables)


def bench_table(run: Run, rows: Sequence[RowSummary], columns: Sequence[str] = ()) -> str:
    """Return rows of one workload as a table, the fastest one in bold; no ``columns`` means all."""
    fastest = max(rows, key=lambda row: row.tokens_per_s.median)
    lines = [cells(run, row) for row in rows]
    for row, line in zip(rows, lines, strict=True):
        if row is fastest:
            line["method"] = f"**{line['method']}**"
    return _dict_table(lines, columns)


def _ratios_table(found: Sequence[Sequence[RowSummary]]) -> str:
    """Return a row per method and a column per pair and workload, the fastest of each in bold."""
    ratios = {
        f"{rows[0].pair}, {rows[0].workload}": {row.row: row.speedup.median if row.speedup else None for row in rows}
        for rows in found
    }
    methods = list(dict.fromkeys(row.row for rows in found for row in rows))
    return markdown(["method", *ratios], [[name, *(_ratio(ratios[w], name) for w in ratios)] for name in methods])


def _ratio(ratios: dict[str, float | None], method: str) -> str:
    best = max((ratio for ratio in ratios.values() if ratio is not None), default=None)
    text = shown(ratios.get(method), ".2f")
    return f"**{text}**" if best is not None and ratios.get(method) == best else text


def _writers_table(run: Run, found: Sequence[Sequence[RowSummary]]) -> str:
    """Return how several writers at once compare with each alone; "" if no row has several."""
    lines = []
    for rows in found:
        pair, workload = rows[0].pair, rows[0].workload
        spreads = [ratio(run, SEVERAL_WRITERS, name, pair=pair, workload=workload) for name in SINGLE_WRITERS]
        if medians := [spread.median for spread in spreads if spread]:
            each = [shown(spread.median if spread else None, ".2f") for spread in spreads]
            lines.append([f"{pair}, {workload}", *each, f"{min(medians):.2f}"])
    heads = ["pair, workload", *(f"/ {name}" for name in SINGLE_WRITERS), "/ the best of them"]
    return markdown(heads, lines) if lines else ""


def bench_provenance(run: Run) -> str:
    """Return where the figures of a run come from, in a few lines."""
    facts = [*_places(run.machine), run.dtype]
    facts += [f"{pair.name}: target costs {pair.target_cost}" for pair in run.pairs if pair.target_cost]
    prompts = ", ".join(f"{workload.num_prompts} of {workload.name}" for workload in run.workloads)
    facts.append(f"prompts: {prompts}; {run.repeats} repeats, at most {run.max_tokens} tokens each")
    facts.append(f"T = {run.sampling.temperature:g}, seed {run.sampling.seed}")
    if run.status != "complete":
        facts.append("interrupted: what is complete is shown")
    return _signed(facts, run.versions, run.command, run.commit, run.date)


def concurrency_tables(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return one run of `concurrency.py`: the summary, then the rows of each concurrency."""
    tables = [_dict_table([load_report.summary_cells(line) for line in lines if line["kind"] == "summary"], ())]
    for concurrency, same in itertools.groupby(lines, lambda line: line["concurrency"]):
        rows = [line for line in same if line["kind"] == "row"]
        tables.append(f"{concurrency} at once, {rows[0]['num_prompts']} requests:")
        tables.append(_dict_table([load_report.row_cells(line) for line in rows], columns))
    return "\n\n".join(tables)


def validation_tables(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return the runs of `planner_validation.py`: median errors, then speeds and parts of each price."""
    rows = validation_report.rows_of(lines)
    tables = [_dict_table(validation_report.summary_cells(rows), ())]
    for price in dict.fromkeys(row["price"] for row in rows):
        same = [row for row in rows if row["price"] == price]
        tables.append(f"Target at the price of {price}:" if price != "none" else "Target at its own price:")
        tables.append(_dict_table([validation_report.error_cells(row) for row in same], columns))
        tables.append("A round of these:")
        tables.append(_dict_table([validation_report.part_cells(row) for row in same], columns))
    return "\n\n".join(tables)


def _dict_table(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> str:
    shown = [column for column in rows[0] if not columns or column in columns]
    return markdown(shown, [[row[column] for column in shown] for row in rows])


def provenance(lines: Sequence[dict[str, Any]]) -> str:
    """Return where the figures of a script's own lines come from, in a few lines."""
    line = lines[0]
    facts = [*_places(line["machine"]), line["dtype"]]
    if line["target_cost"]:
        facts.append(f"target costs {line['target_cost']}")
    if "num_prompts" in line:
        prompts = sorted({one["num_prompts"] for one in lines if "num_prompts" in one})
        counted = f"{prompts[0]} to {prompts[-1]}" if len(prompts) > 1 else f"{prompts[0]}"
        facts.append(f"{counted} prompts, {line['repeats']} repeats, at most {line['max_tokens']} tokens each")
        facts.append(f"T = {line['temperature']:g}, seed {line['seed']}")
    return _signed(facts, line["versions"], line["command"], line["commit"], line["started"])


def _places(machine: dict[str, Any]) -> list[str]:
    facts = [f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']} at the start"]
    return facts + [f"{gpu['name']}, {gpu['memory_gb']:.0f} GB" for gpu in machine.get("gpus", [])]


def _signed(facts: Sequence[str], versions: dict[str, str], command: str, commit: str, date: str) -> str:
    known, *dirty = commit.split("-")
    shown_commit = "-".join([known[:12], *dirty])
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    return f"{'; '.join([*facts, packages])}.\n`{command}` at commit `{shown_commit}`, {date[:10]}."


TABLES: dict[str, Callable[[Sequence[dict[str, Any]], Sequence[str]], str]] = {
    "concurrency": concurrency_tables,
    "planner_validation": validation_tables,
}
_OVER_RUNS = frozenset({"planner_validation"})  # a run for each price, and one table for all


def texts_of(path: Path, columns: Sequence[str]) -> list[str]:
    """Return the tables of each run of a file. Raises: BenchError for a file that is not what it should be."""
    try:
        if is_bench_file(path):
            return [f"{bench_tables(run, columns)}\n\n{bench_provenance(run)}\n" for run in load(path)]
        runs = read_runs(path)
        if unknown := {run[0]["benchmark"] for run in runs} - TABLES.keys():
            known = ", ".join(TABLES)
            raise BenchError(f"{path} holds lines of {min(unknown)}; known: card bench, {known}; measure it anew")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BenchError(f"{path} holds no benchmark lines: {error!r}") from error
    if runs[0][0]["benchmark"] in _OVER_RUNS:
        lines = list(itertools.chain(*runs))
        sources = "\n\n".join(map(provenance, runs))
        return [f"{TABLES[lines[0]['benchmark']](lines, columns)}\n\n{sources}\n"]
    return [f"{TABLES[lines[0]['benchmark']](lines, columns)}\n\n{provenance(lines)}\n" for lines in runs]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of the last run in each file, or of all runs. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "files", type=Path, nargs="+", help=f"files of card bench, or lines of {', '.join(TABLES)}; may be packed (.gz)"
    )
    parser.add_argument("--columns", default="", help="columns of tables with a row per method, with commas")
    parser.add_argument("--all-runs", action="store_true", help="every run of a file, not just the last one")
    args = parser.parse_args(argv)
    columns = [column for column in args.columns.split(",") if column]
    for path in args.files:
        try:
            with unpacked(path) as lines:
                texts = texts_of(lines, columns)
        except (BenchError, OSError) as error:
            print(f"table.py: error: {error}", file=sys.stderr)
            return 2
        for text in texts if args.all_runs else texts[-1:]:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
