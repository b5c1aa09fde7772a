"""Figures and tables of `methods.py`: runs in, plain values for JSON out, and a table for the terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:  # so that making a table needs no torch
    from compare import Difference
    from rows import Decoded

    from card.metrics import RequestStats

# The draft settings that may be given on the command line, with their types; they are those of `card.config`.
DRAFT_OPTIONS: dict[str, type] = {
    "beam_width": int,
    "branch": int,
    "budget": int,
    "min_verify_prob": float,
    "lead": int,
    "max_wait_s": float,
    "min_depth": int,
}

_DRAFTER = "beam"  # the draft model's name among the writers
_SHOWN_SHARE = 0.05  # of a writer, in tables
_LONG_COLUMNS = ("range", "layers/s", "of ceiling", "overhead, ms", "rolled back per token", "accepted from")

_OWN_FIELDS = (  # only our own methods count these
    "drafter_passes",
    "hit_rate",
    "hits",
    "late_hits",
    "misses",
    "drafter_layers_per_s",
    "ceiling_share",
    "target_pass_ms",
    "between_passes_ms",
    "waited_ms",
    "round_overhead_ms",
    "schedules",
    "verified_per_emitted",
    "rolled_back_per_emitted",
    "acceptance_rate",
    "acceptance_per_depth",
    "accepted_by_writer",
    "drafter_restarts",
)


def tokens_per_s(runs: Sequence[Decoded]) -> float:
    """Return the tokens of decoding per second of decoding, over all these runs together."""
    seconds = sum(run.decode_s for run in runs)
    return sum(run.decode_tokens for run in runs) / seconds if seconds > 0 else 0.0


def speed_fields(runs: Sequence[Sequence[Decoded]]) -> dict[str, Any]:
    """Return the speed, median and range over repeats; ``runs`` holds one list per repeat."""
    rates = [tokens_per_s(repeat) for repeat in runs]
    totals = [sum(len(r.token_ids) for r in repeat) / sum(r.total_s for r in repeat) for repeat in runs]
    return {
        "decode_tokens_per_s": round(statistics.median(rates), 3),
        "range": [round(min(rates), 3), round(max(rates), 3)],
        "decode_tokens_per_s_runs": [round(rate, 3) for rate in rates],
        "total_tokens_per_s": round(statistics.median(totals), 3),  # reading the prompt included
        "num_tokens": sum(len(run.token_ids) for run in runs[0]),  # of one repeat
    }


def comparison_fields(differences: Sequence[Difference] | None) -> dict[str, Any]:
    """Return how the texts compare with plain decoding's; all None if they cannot be compared."""
    if differences is None:
        return {"outputs_equal": None, "differences_are_near_ties": None, "first_differences": []}
    return {
        "outputs_equal": not differences,
        "differences_are_near_ties": all(difference.is_near_tie for difference in differences),
        "first_differences": [difference.as_dict() for difference in differences],
    }


def cost_fields(runs: Sequence[Decoded]) -> dict[str, Any]:
    """Return what the speed was made of, over all runs; None for what a method does not have or say."""
    passes = sum(run.target_passes for run in runs)
    tokens, total_s = sum(run.decode_tokens for run in runs), sum(run.total_s for run in runs)
    fields: dict[str, Any] = {
        "target_passes": passes,
        "mean_acceptance_length": round(tokens / passes, 3) if passes else None,
        "cores_used": round(sum(run.cpu_s for run in runs) / total_s, 2),  # by the target's process, prefill included
        **dict.fromkeys(_OWN_FIELDS),
    }
    stats = [run.stats for run in runs if run.stats is not None]
    if not stats or not passes:
        return fields
    fields |= _time_fields(stats, passes)
    if any(s.verified_tokens for s in stats):
        fields |= _candidate_fields(stats, passes, tokens)
    if any(s.drafter_passes for s in stats):
        fields |= _drafter_fields(stats, passes, tokens, tokens_per_s(runs))
    return fields


def _time_fields(stats: Sequence[RequestStats], passes: int) -> dict[str, Any]:
    """Return where the time between two target passes went."""
    busy_s, waited_s = sum(s.target_busy_s for s in stats), sum(s.waited_s for s in stats)
    decode_s = sum(s.decode_s for s in stats)
    schedules = Counter(s.speculation.partition(":")[0] for s in stats)  # that each text ended with
    fields: dict[str, Any] = {
        "target_pass_ms": round(1e3 * busy_s / passes, 3),
        "waited_ms": round(1e3 * waited_s / passes, 3),  # a drafter that takes turns drafts in it
        "between_passes_ms": round(1e3 * (decode_s - busy_s) / passes, 3),
        "schedules": dict(schedules),
    }
    if not schedules["turns"]:  # a drafter that takes turns drafts between the passes, which is no overhead
        fields["round_overhead_ms"] = round(1e3 * (decode_s - busy_s - waited_s) / passes, 3)
    return fields


def _candidate_fields(stats: Sequence[RequestStats], passes: int, tokens: int) -> dict[str, Any]:
    """Return how the candidates fared, whoever proposed them."""
    accepted, verified = sum(s.accepted_tokens for s in stats), sum(s.verified_tokens for s in stats)
    kept, offered = (
        [sum(counts) for counts in zip_longest(*(getattr(s, name) for s in stats), fillvalue=0)]
        for name in ("accepted_per_depth", "offered_per_depth")
    )
    by_writer: Counter[str] = Counter()
    for s in stats:
        by_writer.update(s.accepted_by_writer)
    if alone := accepted - by_writer.total():  # nobody is named where the draft model alone could propose
        by_writer[_DRAFTER] += alone
    return {
        "mean_acceptance_length": round(1 + accepted / passes, 3),
        "verified_per_emitted": round(verified / tokens, 3) if tokens else None,
        "acceptance_rate": round(accepted / verified, 4),
        "acceptance_per_depth": [round(a / o, 4) for a, o in zip_longest(kept, offered, fillvalue=0)],
        "accepted_by_writer": {name: round(count / accepted, 4) for name, count in by_writer.most_common()},
    }


def _drafter_fields(stats: Sequence[RequestStats], passes: int, tokens: int, rate: float) -> dict[str, Any]:
    """Return what the draft model did; ``rate`` is the speed reached, in tokens/s."""
    layers, layers_s = sum(s.drafter_passes for s in stats), sum(s.drafter_busy_s for s in stats)
    fields: dict[str, Any] = {name: sum(getattr(s, name) for s in stats) for name in ("hits", "late_hits", "misses")}
    dropped = sum(s.drafter_dropped_nodes for s in stats)
    fields |= {
        "drafter_passes": layers,
        "hit_rate": round(min(1.0, (fields["hits"] + fields["late_hits"]) / passes), 4),
        "rolled_back_per_emitted": round(dropped / tokens, 3) if tokens else None,
        "drafter_restarts": sum(s.drafter_restarts for s in stats),
    }
    if layers_s:
        fields["drafter_layers_per_s"] = round(layers / layers_s, 2)
        fields["ceiling_share"] = round(rate / (layers / layers_s), 4)
    return fields


def by_workload(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one run, workload by workload in their order; older lines have no workload's name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line.get("workload", ""), []).append(line)
    return found


def same_text(line: dict[str, Any]) -> str:
    """Return in a word or two how a row's texts compare with plain decoding's."""
    if line["outputs_equal"] is None:
        return "other random numbers"
    if line["outputs_equal"]:
        return "yes"
    prompts = len({difference["prompt"] for difference in line["first_differences"]})
    if line["differences_are_near_ties"]:
        return f"near-ties in {prompts} of {line['num_prompts']}"
    return f"NO, in {prompts} of {line['num_prompts']}"


def shown(value: float | None, form: str) -> str:
    """Return a figure as text; a dash if there is none."""
    return "–" if value is None else format(value, form)


def choice(settings: dict[str, Any]) -> str:
    """Return the draft length that was chosen for a row, if one was."""
    if "assistant" in settings:
        return f" ({settings['assistant']})"
    return f" (length {settings['num_speculative_tokens']})" if "num_speculative_tokens" in settings else ""


def by_writer(shares: dict[str, float] | None) -> str:
    """Return who proposed what was accepted, the largest shares first."""
    named = [f"{name} {share:.0%}" for name, share in (shares or {}).items() if share >= _SHOWN_SHARE]
    return ", ".join(named) or "–"


def cells(line: dict[str, Any]) -> dict[str, str]:
    """Return what a table shows of a row, by column."""
    low, high = line["range"]
    return {
        "method": line["method"] + choice(line["settings"]),
        "tokens/s": f"{line['decode_tokens_per_s']:.1f}",
        "range": f"{low:.1f}–{high:.1f}",
        "vs one core": shown(line["speedup_same_core"], ".2f"),
        "vs all cores": shown(line["speedup_all_cores"], ".2f"),
        "tokens a pass": shown(line["mean_acceptance_length"], ".2f"),
        "hit rate": shown(line["hit_rate"], ".0%"),
        "layers/s": shown(line["drafter_layers_per_s"], ".0f"),
        "of ceiling": shown(line["ceiling_share"], ".0%"),
        "pass, ms": shown(line["target_pass_ms"], ".2f"),
        "overhead, ms": shown(line["round_overhead_ms"], ".2f"),
        "verified per token": shown(line["verified_per_emitted"], ".2f"),
        "rolled back per token": shown(line.get("rolled_back_per_emitted"), ".2f"),
        "accepted from": by_writer(line.get("accepted_by_writer")),
        "same text": same_text(line),
    }


def brief_cells(line: dict[str, Any]) -> dict[str, str]:
    """Return the part of `cells` that fits into a terminal."""
    return {column: text for column, text in cells(line).items() if column not in _LONG_COLUMNS}


def server_cells(line: dict[str, Any]) -> dict[str, str]:
    """Return what a table shows of a row of `draft_server.py`, by column."""
    low, high = line["range"]
    return {
        "drafter": line["method"],
        "tokens/s": f"{line['decode_tokens_per_s']:.1f}",
        "range": f"{low:.1f}–{high:.1f}",
        "vs process": shown(line["speedup_process"], ".2f"),
        "vs vanilla": shown(line["speedup_same_core"], ".2f"),
        "tokens a pass": shown(line["mean_acceptance_length"], ".2f"),
        "hit rate": shown(line["hit_rate"], ".0%"),
        "waited, ms": shown(line["waited_ms"], ".2f"),
        "same text": same_text(line),
    }


def rich_table(
    lines: Sequence[dict[str, Any]], cells: Callable[[dict[str, Any]], dict[str, str]] = brief_cells
) -> Table:
    """Return the rows of one run as a table for the terminal; ``cells`` says what is shown of one."""
    first = lines[0]
    title = (
        f"{first['num_prompts']} prompts, {first['repeats']} repeats, {first['dtype']}, T = {first['temperature']:g}"
    )
    if "workload" in first:
        title = f"{first['workload']}: {title}"
    table = Table(title=title, caption=f"target costs {first['target_cost']}" if first["target_cost"] else None)
    for i, column in enumerate(cells(first)):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for line in lines:
        table.add_row(*cells(line).values())
    return table
