"""Make Markdown tables from the lines of `run.py`.

python benchmarks/peers/peer_table.py benchmarks/results/peers_90M_intel.jsonl.gz
python benchmarks/peers/peer_table.py benchmarks/results/peers_90M_intel.jsonl.gz --all        # all rows of ours, too
python benchmarks/peers/peer_table.py benchmarks/results/peers_90M_intel.jsonl.gz --fastest    # few rows
python benchmarks/peers/peer_table.py benchmarks/results/peers_*_intel.jsonl* --overview       # one table of all
python benchmarks/peers/peer_table.py benchmarks/results/peers_*_intel.jsonl* --by-engine      # the same, turned
python benchmarks/peers/peer_table.py FILE --first-token    # how fast prompts of `run.py --prompt-lengths` are read

Of ours, tables show `card`, and `card-beam` (no copies) where it was run. Both are compared with the fastest of our
fixed rows (plain decoding, suffix, sequential speculation of each length) in the same weights, and with the fastest row
of any peer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from catalog import BEAM_ALONE, IK, OPENVINO, OURS, RowKey
from pages import markdown
from peer_results import Line, Ratio, Summary, groups, prompts_of, read_lines, summarise

_VS_FIXED, _VS_PEER = f"{OURS} / best own fixed row", f"{OURS} / best peer"
_HEADER = (
    "engine",
    "weights",
    "method",
    "tokens/s",
    "range",
    "first token, ms",
    "memory, GB",
    _VS_FIXED,
    _VS_PEER,
    "vs peers of as many bits",
    "same text",
)
_SHOWN = (OURS, BEAM_ALONE)  # of ours
_PLAIN = "vanilla-all-cores"
_PEERS = ("llama.cpp", IK, OPENVINO, "vllm")


def tables(lines: Sequence[Line], *, fastest: bool = False, has_all: bool = False) -> str:
    """Return a table for each model and set of prompts, the fastest row first; of ours, `card` and `card-beam`.

    Args:
        fastest: only the fastest row of each other engine.
        has_all: all rows of ours, too.
    """
    parts = []
    for title, of_group in groups(lines).items():
        summaries = [one for one in summarise(of_group) if has_all or one.row.peer != OURS or one.row.method in _SHOWN]
        if fastest:
            first_of = {summary.row.peer: summary for summary in reversed(summaries)}
            summaries = [one for one in summaries if first_of[one.row.peer] is one or one.row.peer == OURS]
        parts += [f"{title}:", table(summaries)]
    return "\n\n".join([*parts, note(lines)])


def overview(files: Sequence[Sequence[Line]], *, by_engine: bool = False, weights: Collection[str] = ("int8",)) -> str:
    """Return one table of several files: `card` and plain decoding of ours, and the fastest row of each peer.

    Args:
        by_engine: a column for each group, instead of a line.
        weights: those of ours.
    """
    peers = [peer for peer in _PEERS if any(line["peer"] == peer for lines in files for line in lines)]
    rows: list[Sequence[str]] = [("tokens/s", OURS, _PLAIN, *peers, _VS_FIXED, _VS_PEER)]
    for lines in files:
        for title, of_group in groups(lines).items():
            summaries = summarise(of_group)
            own = {one.row.method: one for one in summaries if one.row.peer == OURS and one.row.quantisation in weights}
            first_of = {one.row.peer: one for one in reversed(summaries)}
            cells = [f"{own[name].tokens_per_s:.0f}" if name in own else "–" for name in (OURS, _PLAIN)]
            for peer in peers:
                found = first_of.get(peer)
                cells.append(f"{found.tokens_per_s:.0f} {found.row.quantisation}" if found else "–")
            ours = own.get(OURS)
            rows.append([title, *cells, _named(ours.vs_fixed if ours else None), _shown(ours and ours.vs_fastest)])
    if by_engine:
        rows = list(zip(*rows, strict=True))
    return markdown(rows[0], rows[1:])


def table(summaries: Sequence[Summary]) -> str:
    """Return the rows of one group as a table."""
    return markdown(_HEADER, map(_cells, summaries), num_words=3, last="---")


def first_tokens(lines: Sequence[Line]) -> str:
    """Return how many tokens of prompts of certain lengths each row reads in a second, until its first token.

    The row that is fastest at the longest prompts comes first.
    """
    waits: dict[RowKey, dict[int, list[float]]] = {}
    for line in lines:
        if line["kind"] == "decode" and line["prompts"] == prompts_of(line["prompt_tokens"]):
            row = RowKey(line["peer"], line["quantisation"], line["method"])
            waits.setdefault(row, {}).setdefault(line["prompt_tokens"], []).append(line["prefill_s"])
    lengths = sorted({length for of_row in waits.values() for length in of_row})
    rates = {
        row: [length / statistics.median(of_row[length]) if length in of_row else 0.0 for length in lengths]
        for row, of_row in waits.items()
    }
    rows = [
        [row.peer, row.quantisation, row.method, *(f"{rate:.0f}" if rate else "–" for rate in of_lengths)]
        for row, of_lengths in sorted(rates.items(), key=lambda one: one[1][::-1], reverse=True)
    ]
    columns = ["engine", "weights", "method", *(prompts_of(length) for length in lengths)]
    return "\n\n".join([markdown(columns, rows, num_words=3), note(lines)])


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
        _named(summary.vs_fixed),
        _named(summary.vs_fastest) if row.peer == OURS else _shown(summary.vs_fastest),
        _shown(summary.vs_fastest_bits),
        f"{summary.num_same} of {summary.num_texts}",
    ]


def _shown(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{ratio.value:.2f}"


def _named(ratio: Ratio | None) -> str:
    """Return a ratio with the row that it is over."""
    if ratio is None:
        return "–"
    other = ratio.other
    name = other.method if other.peer == OURS else f"{other.peer} {other.quantisation} {other.method}"
    return f"{ratio.value:.2f} ({name})"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of the last run of each file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", help="files of benchmarks/peers/run.py; may be packed (.gz)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--overview", action="store_true", help="one table of all files: the fastest row of each peer")
    form.add_argument("--by-engine", action="store_true", help="the same with a line for each engine")
    form.add_argument("--fastest", action="store_true", help="only the fastest row of each engine, and `card`")
    form.add_argument("--first-token", action="store_true", help="tokens of long prompts read in a second, of all rows")
    form.add_argument("--all", action="store_true", help="all rows of ours, too")
    parser.add_argument("--weights", default="int8", help="of ours in one table, such as Q4_0,Q4_K_M [%(default)s]")
    args = parser.parse_args(argv)
    try:
        files = [read_lines(path) for path in args.files]
        if args.overview or args.by_engine:
            print(overview(files, by_engine=args.by_engine, weights=args.weights.split(",")))
        elif args.first_token:
            print("\n\n".join(map(first_tokens, files)))
        else:
            print("\n\n".join(tables(one, fastest=args.fastest, has_all=args.all) for one in files))
    except (OSError, ValueError) as error:
        print(f"peer_table.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
