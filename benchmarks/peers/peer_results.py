"""Lines of results: texts compared with plain decoding's, and figures of many lines put together. Nothing runs here."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catalog import BITS, OURS, RowKey

BENCHMARK = "peers"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A rate over that of another row."""

    value: float
    other: RowKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One row over all prompts of a set."""

    row: RowKey
    version: str
    option: str  # the settings that tell it from others, in a few words
    tokens_per_s: float  # median over repeats
    least: float
    most: float
    num_texts: int
    num_same: int  # texts equal to plain decoding's
    first_token_s: float | None  # median time until the first token
    peak_bytes: int | None  # most memory of its worker, mapped files with it; None: not measured
    vs_fastest: Ratio | None  # over the fastest row that is not ours
    vs_fastest_bits: Ratio | None  # over the fastest one of as many bits a weight
    vs_fixed: Ratio | None  # over the fastest of our fixed rows of the same weights; for ours alone


def prompts_of(num_tokens: int) -> str:
    """Return the name of the prompts that are cut to a length."""
    return f"{num_tokens} tokens"


def parts_at(token_ids: Sequence[int], reference: Sequence[int], end_ids: Collection[int]) -> int | None:
    """Return where a text leaves the reference; None if they are equal, an end token or none at the end aside."""
    own, other = _without_end(token_ids, end_ids), _without_end(reference, end_ids)
    if own == other:
        return None
    pairs = zip(own, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(other)))


def fingerprint(token_ids: Sequence[int], end_ids: Collection[int]) -> str:
    """Return a short name of a text: texts of other engines and weights may be compared by it, too."""
    return hashlib.sha256(json.dumps(_without_end(token_ids, end_ids)).encode()).hexdigest()[:12]


def _without_end(token_ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    return list(token_ids[:-1] if token_ids and token_ids[-1] in end_ids else token_ids)


def decode_lines(
    answers: Mapping[RowKey, Mapping[str, Any]], facts: Mapping[RowKey, Line], common: Line, end_ids: Collection[int]
) -> list[Line]:
    """Return a line for each row that decoded one prompt, its text compared with its reference's.

    Args:
        answers: what the workers said, by row.
        facts: what is said of each row: version and settings.
        common: what all lines hold.
    """
    lines = []
    for row, answer in answers.items():
        reference = answers.get(row.reference)
        position = parts_at(answer["token_ids"], reference["token_ids"], end_ids) if reference else None
        line = {"kind": "decode", **common, "peer": row.peer, "quantisation": row.quantisation, "method": row.method}
        line |= facts[row]
        line |= {name: answer[name] for name in ("prefill_s", "decode_s", "decode_tokens", "accepted")}
        line["peak_bytes"] = answer["peak_bytes"]
        line["tokens"] = len(answer["token_ids"])
        line["text"] = fingerprint(answer["token_ids"], end_ids)
        line["tokens_per_s"] = _rate([line])
        line["same_text"] = None if reference is None else position is None
        line["parts_at"] = position
        lines.append(line)
    return lines


def batch_lines(
    answers: Mapping[RowKey, Mapping[str, Any]], facts: Mapping[RowKey, Line], common: Line, end_ids: Collection[int]
) -> list[Line]:
    """Return a line for each row that decoded several prompts at once; see `decode_lines`."""
    lines = []
    for row, answer in answers.items():
        texts, reference = answer["token_ids"], answers.get(row.reference)
        line = {"kind": "batch", **common, "peer": row.peer, "quantisation": row.quantisation, "method": row.method}
        line |= facts[row]
        line |= {"tokens": sum(map(len, texts)), "wall_s": answer["wall_s"], "num_texts": len(texts)}
        line["peak_bytes"] = answer["peak_bytes"]
        line["tokens_per_s"] = line["tokens"] / line["wall_s"]
        line["num_same"] = None
        if reference is not None:
            pairs = zip(texts, reference["token_ids"], strict=True)
            line["num_same"] = sum(parts_at(own, other, end_ids) is None for own, other in pairs)
        lines.append(line)
    return lines


def read_lines(path: Path) -> list[Line]:
    """Return the lines of the last run in a file. Raises: OSError; ValueError if they are another benchmark's."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    if not lines or any(line.get("benchmark") != BENCHMARK for line in lines):
        raise ValueError(f"{path} holds no lines of benchmarks/{BENCHMARK}, or others, too")
    return [line for line in lines if line["run"] == lines[-1]["run"]]


def groups(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return lines by what may be compared: model, prompts and requests at once, as a title says it."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        at_once = f", {line['at_once']} at once" if line["kind"] == "batch" else ""
        found.setdefault(f"{line['model']}, {line['prompts']}{at_once}", []).append(line)
    return found


def summarise(lines: Sequence[Line]) -> list[Summary]:
    """Return the rows of one group, the fastest first."""
    by_row: dict[RowKey, list[Line]] = {}
    for line in lines:
        by_row.setdefault(RowKey(line["peer"], line["quantisation"], line["method"]), []).append(line)
    rates = {row: statistics.median(_rates(of_row)) for row, of_row in by_row.items()}
    peers = {row: rate for row, rate in rates.items() if row.peer != OURS}
    summaries = []
    for row, of_row in by_row.items():
        alike = {other: rate for other, rate in peers.items() if BITS[other.quantisation] == BITS[row.quantisation]}
        fixed = {
            other: rate
            for other, rate in rates.items()
            if other.is_own_fixed and (other.peer, other.quantisation) == (row.peer, row.quantisation)
        }
        num_texts, num_same = _counts(of_row)
        summaries.append(
            Summary(
                row=row,
                version=of_row[0]["version"],
                option=option_text(of_row[0]["settings"]),
                tokens_per_s=rates[row],
                least=min(_rates(of_row)),
                most=max(_rates(of_row)),
                num_texts=num_texts,
                num_same=num_same,
                first_token_s=statistics.median(waits) if (waits := _waits(of_row)) else None,
                peak_bytes=max((line["peak_bytes"] for line in of_row if "peak_bytes" in line), default=None),
                vs_fastest=_ratio(rates[row], peers),
                vs_fastest_bits=_ratio(rates[row], alike),
                vs_fixed=_ratio(rates[row], fixed),
            )
        )
    return sorted(summaries, key=lambda summary: -summary.tokens_per_s)


def _waits(lines: Sequence[Line]) -> list[float]:
    """Return the times until first tokens, in seconds; none for several requests at once."""
    return [line["prefill_s"] for line in lines if "prefill_s" in line]


def option_text(settings: Mapping[str, Any]) -> str:
    """Return in a few words what was chosen for a row."""
    words = [f"K={settings[name]}" for name in ("draft_tokens", "num_speculative_tokens") if name in settings]
    return ", ".join([*words, *(str(settings[name]) for name in ("attention", "assistant") if name in settings)])


def _rates(lines: Sequence[Line]) -> list[float]:
    """Return tokens/s over all prompts, repeat by repeat."""
    in_order = sorted(lines, key=lambda line: line["repeat"])
    return [_rate(list(of_repeat)) for _, of_repeat in itertools.groupby(in_order, lambda line: line["repeat"])]


def _rate(lines: Sequence[Line]) -> float:
    tokens, seconds = ("tokens", "wall_s") if lines[0]["kind"] == "batch" else ("decode_tokens", "decode_s")
    total_s = sum(line[seconds] for line in lines)
    return float(sum(line[tokens] for line in lines) / total_s) if total_s > 0 else 0.0


def _counts(lines: Sequence[Line]) -> tuple[int, int]:
    """Return how many texts were compared and how many of them were the reference's."""
    if lines[0]["kind"] == "batch":
        compared = [line for line in lines if line["num_same"] is not None]
        return sum(line["num_texts"] for line in compared), sum(line["num_same"] for line in compared)
    compared = [line for line in lines if line["same_text"] is not None]
    return len(compared), sum(line["same_text"] for line in compared)


def _ratio(rate: float, others: Mapping[RowKey, float]) -> Ratio | None:
    best = max(others, key=others.__getitem__, default=None)
    return Ratio(rate / others[best], best) if best is not None and others[best] > 0 else None
