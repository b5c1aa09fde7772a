"""Make the README's Markdown tables from the JSON lines of the benchmarks.

python benchmarks/table.py benchmarks/results/methods.jsonl
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
import report


def read_runs(path: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of a file, run by run, in their order."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [list(run) for _, run in itertools.groupby(lines, lambda line: (line["started"], line["command"]))]


def methods_tables(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return one run of `methods.py` as a table per workload; several are compared in one more, before them."""
    by_workload = report.by_workload(lines)
    if len(by_workload) == 1:
        return methods_table(lines, columns)
    tables = ["Against plain decoding on all cores:", _ratios_table(by_workload)]
    if writers := _writers_table(by_workload):
        tables += ["Several writers at once, against each of them alone:", writers]
    for name, same in by_workload.items():
        tables += [f"Workload {name}, {same[0]['num_prompts']} prompts:", methods_table(same, columns)]
    return "\n\n".join(tables)


def methods_table(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows of one workload as a table, the fastest one in bold; no ``columns`` means all."""
    rows = [report.cells(line) for line in lines]
    fastest = max(range(len(lines)), key=lambda i: lines[i]["decode_tokens_per_s"])
    rows[fastest] = {column: f"**{text}**" if column == "method" else text for column, text in rows[fastest].items()}
    return _dict_table(rows, columns)


def _ratios_table(by_workload: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Return a row per method and a column per workload, the fastest of each workload in bold."""
    ratios = {w: {line["method"]: line["speedup_all_cores"] for line in same} for w, same in by_workload.items()}
    methods = list(dict.fromkeys(line["method"] for same in by_workload.values() for line in same))
    rows = [[method, *(_ratio(ratios[w], method) for w in ratios)] for method in methods]
    return markdown(["method", *ratios], rows)


def _ratio(ratios: dict[str, float | None], method: str) -> str:
    best = max((ratio for ratio in ratios.values() if ratio is not None), default=None)
    text = report.shown(ratios.get(method), ".2f")
    return f"**{text}**" if best is not None and ratios.get(method) == best else text


def _writers_table(by_workload: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Return how several writers at once compare with each alone, by workload; "" if no row has several."""
    lines = [(w, line) for w, same in by_workload.items() for line in same]
    ratios = {w: line["vs_single_writers"] for w, line in lines if line.get("vs_single_writers")}
    singles = list(dict.fromkeys(name for of_workload in ratios.values() for name in of_workload))
    rows = [
        [w, *(report.shown(found.get(name), ".2f") for name in singles), f"{min(found.values()):.2f}"]
        for w, found in ratios.items()
    ]
    return markdown(["workload", *(f"/ {name}" for name in singles), "/ the best of them"], rows) if rows else ""


def gpu_tables(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return one run of `gpu.py` as tables, one per price of the target."""
    tables = []
    for target_cost, same in itertools.groupby(lines, lambda line: line["target_cost"]):
        tables += [f"Target {target_cost}:", methods_table(list(same), columns)]
    return "\n\n".join(tables)


def profile_tables(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return one run of `profile_rounds.py` as tables, one per kind; ``columns`` are not chosen here."""
    del columns
    return "\n\n".join(_profile_table(list(same)) for _, same in itertools.groupby(lines, lambda line: line["kind"]))


def _profile_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return one row per part and one column per thing profiled."""
    parts = list(dict.fromkeys(part for line in lines for part in line["parts"]))
    rows = [[part, *(report.shown(line["parts"].get(part), ".0f") for line in lines)] for part in parts]
    rows += [[f"**{t}**", *(f"{line[f'{t}_us']:.0f}" for line in lines)] for t in ("overhead", "total")]
    return markdown(["median, µs", *(line["what"] for line in lines)], rows)


def concurrency_tables(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return one run of `concurrency.py`: the summary, then the rows of each concurrency."""
    tables = [_dict_table([load_report.summary_cells(line) for line in lines if line["kind"] == "summary"], ())]
    for concurrency, same in itertools.groupby(lines, lambda line: line["concurrency"]):
        rows = [line for line in same if line["kind"] == "row"]
        tables.append(f"{concurrency} at once, {rows[0]['num_prompts']} requests:")
        tables.append(_dict_table([load_report.row_cells(line) for line in rows], columns))
    return "\n\n".join(tables)


def draft_server_table(lines: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return one run of `draft_server.py` as a table."""
    return _dict_table([report.server_cells(line) for line in lines], columns)


def _dict_table(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> str:
    shown = [column for column in rows[0] if not columns or column in columns]
    return markdown(shown, [[row[column] for column in shown] for row in rows])


def provenance(lines: Sequence[dict[str, Any]]) -> str:
    """Return where the figures of a run come from, in a few lines."""
    line = lines[0]
    machine, versions = line["machine"], line["versions"]
    facts = [f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average']} at the start"]
    facts += [f"{gpu['name']}, {gpu['memory_gb']:.0f} GB" for gpu in machine.get("gpus", [])]
    facts.append(line["dtype"])
    if line["target_cost"]:
        facts.append(f"target costs {line['target_cost']}")
    if line.get("draft_cost"):
        facts.append(f"draft costs {line['draft_cost']}")
    if "num_prompts" in line:
        prompts = sorted({one["num_prompts"] for one in lines if "num_prompts" in one})
        shown = f"{prompts[0]} to {prompts[-1]}" if len(prompts) > 1 else f"{prompts[0]}"
        facts.append(f"{shown} prompts, {line['repeats']} repeats, at most {line['max_tokens']} tokens each")
        facts.append(f"T = {line['temperature']:g}, seed {line['seed']}")
    facts.append(f"torch {versions['torch']}, transformers {versions['transformers']}")
    commit, *dirty = line["commit"].split("-")
    commit = "-".join([commit[:12], *dirty])
    return f"{'; '.join(facts)}.\n`{line['command']}` at commit `{commit}`, {line['started'][:10]}."


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is aligned left, the others right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, rule, *rows])


TABLES: dict[str, Callable[[Sequence[dict[str, Any]], Sequence[str]], str]] = {
    "methods": methods_tables,
    "gpu": gpu_tables,
    "concurrency": concurrency_tables,
    "draft_server": draft_server_table,
    "profile_rounds": profile_tables,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of the last run in each file, or of all runs. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", help=f"JSON lines of {', '.join(TABLES)}")
    parser.add_argument("--columns", default="", help="columns of tables with a row per method, with commas")
    parser.add_argument("--all-runs", action="store_true", help="every run of a file, not just the last one")
    args = parser.parse_args(argv)
    for path in args.files:
        try:
            runs = read_runs(path)
            unknown = {run[0]["benchmark"] for run in runs} - TABLES.keys()
        except (OSError, ValueError, KeyError) as error:
            print(f"table.py: error: {path} holds no benchmark lines: {error!r}", file=sys.stderr)
            return 2
        if unknown:
            print(f"table.py: error: {path} holds lines of {min(unknown)}; known: {', '.join(TABLES)}", file=sys.stderr)
            return 2
        columns = [column for column in args.columns.split(",") if column]
        for lines in runs if args.all_runs else runs[-1:]:
            print(f"{TABLES[lines[0]['benchmark']](lines, columns)}\n\n{provenance(lines)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
