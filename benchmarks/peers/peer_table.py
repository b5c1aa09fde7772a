"""Make Markdown tables from the lines of `run.py`.

python benchmarks/peers/peer_table.py benchmarks/results/peers_90M_intel.jsonl.gz
python benchmarks/peers/peer_table.py benchmarks/results/peers_90M_intel.jsonl.gz --fastest    # few rows
python benchmarks/peers/peer_table.py benchmarks/results/peers_*_intel.jsonl* --overview       # one table of all
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from catalog import OURS
from peer_results import Line, Summary, groups, read_lines, summarise

_HEADER = (
    "engine",
    "weights",
    "method",
    "tokens/s",
    "range",
    "first token, ms",
    "memory, GB",
    "vs fastest peer",
    "vs peers of as many bits",
    "same text",
)
_OWN_ROWS = (OURS, "card-writers", "vanilla-all-cores")  # of an overview
_PEERS = ("llama.cpp", "openvino", "vllm")
_OVERVIEW = ("tokens/s", *_OWN_ROWS, *_PEERS, f"{OURS} / fastest peer")


def tables(lines: Sequence[Line], *, fastest: bool = False) -> str:
    """Return a table for each model and set of prompts, the fastest row first.

    Args:
        fastest: only the fastest row of each engine, and ours as it tunes itself.
    """
    parts = []
    for title, of_group in groups(lines).items():
        summaries = summarise(of_group)
        if fastest:
            first_of = {summary.row.peer: summary for summary in reversed(summaries)}
            summaries = [one for one in summaries if first_of[one.row.peer] is one or one.row.method == OURS]
        parts += [f"{title}:", table(summaries)]
    return "\n\n".join([*parts, note(lines)])


def overview(files: Sequence[Sequence[Line]]) -> str:
    """Return one table of several files: a line for each group, our rows in 8 bits and the fastest row of each peer."""
    rule = ["---", *["---:"] * (len(_OVERVIEW) - 1)]
    rows: list[Sequence[str]] = [_OVERVIEW, rule]
    for lines in files:
        for title, of_group in groups(lines).items():
            summaries = summarise(of_group)
            own = {one.row.method: one for one in summaries if (one.row.peer, one.row.quantisation) == (OURS, "int8")}
            first_of = {one.row.peer: one for one in reversed(summaries)}
            cells = [f"{own[name].tokens_per_s:.0f}" if name in own else "–" for name in _OWN_ROWS]
            for peer in _PEERS:
                found = first_of.get(peer)
                cells.append(f"{found.tokens_per_s:.0f} {found.row.quantisation}" if found else "–")
            rows.append([title, *cells, _shown(own[OURS].vs_fastest if OURS in own else None)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def table(summaries: Sequence[Summary]) -> str:
    """Return the rows of one group as a table."""
    lines = [_cells(summary) for summary in summaries]
    rule = ["---", "---", "---", "---:", "---:", "---:", "---:", "---:", "---:", "---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (_HEADER, rule, *lines))


def note(lines: Sequence[Line]) -> str:
    """Return in a few words what was measured where."""
    machine = lines[0]["machine"]
    versions = sorted({f"{line['peer']} {line['version']}" for line in lines})
    return (
        f"{machine['cpu']}, {machine['cores_used']} cores, load {machine['load_average']} before; greedy, "
        f"{lines[0]['max_tokens']} tokens at most, decoding only; median and range of "
        f"{1 + max(line['repeat'] for line in lines)} repeats. {'; '.join(versions)}; commit {lines[0]['commit'][:12]}."
    )


def _cells(summary: Summary) -> list[str]:
    row, option = summary.row, f" ({summary.option})" if summary.option else ""
    return [
        row.peer,
        row.quantisation,
        row.method + option,
        f"{summary.tokens_per_s:.1f}",
        f"{summary.least:.1f}–{summary.most:.1f}",
        "–" if summary.first_token_s is None else f"{1e3 * summary.first_token_s:.0f}",
        "–" if summary.peak_bytes is None else f"{summary.peak_bytes / 1e9:.2f}",
        _shown(summary.vs_fastest),
        _shown(summary.vs_fastest_bits),
        f"{summary.num_same} of {summary.num_texts}",
    ]


def _shown(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of the last run of each file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", help="files of benchmarks/peers/run.py; may be packed (.gz)")
    parser.add_argument("--overview", action="store_true", help="one table of all files: the fastest row of each peer")
    parser.add_argument("--fastest", action="store_true", help="only the fastest row of each engine, and `card`")
    args = parser.parse_args(argv)
    try:
        files = [read_lines(path) for path in args.files]
        print(overview(files) if args.overview else "\n\n".join(tables(one, fastest=args.fastest) for one in files))
    except (OSError, ValueError) as error:
        print(f"peer_table.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
