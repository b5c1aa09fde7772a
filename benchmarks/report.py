"""Figures and tables of `methods.py`: runs in, plain values for JSON out, and a table for the terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:  # so that making a table needs no torch
    from compare import Difference
    from rows import Decoded

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

_OWN_FIELDS = (  # only our own methods count these
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
    "acceptance_rate",
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
    }
    own: dict[str, Any] = dict.fromkeys(_OWN_FIELDS)
    stats = [run.stats for run in runs if run.stats is not None]
    if not stats or not passes:
        return {**fields, **own}
    busy_s, waited_s = sum(s.target_busy_s for s in stats), sum(s.waited_s for s in stats)
    decode_s, verified = sum(s.decode_s for s in stats), sum(s.verified_tokens for s in stats)
    own["target_pass_ms"] = round(1e3 * busy_s / passes, 3)
    own["waited_ms"] = round(1e3 * waited_s / passes, 3)  # a drafter that takes turns drafts in it
    own["between_passes_ms"] = round(1e3 * (decode_s - busy_s) / passes, 3)
    schedules = Counter(s.speculation.partition(":")[0] for s in stats)  # that each text ended with
    own["schedules"] = dict(schedules)
    if not schedules["turns"]:  # a drafter that takes turns drafts between the passes, which is no overhead
        own["round_overhead_ms"] = round(1e3 * (decode_s - busy_s - waited_s) / passes, 3)
    layers, layers_s = sum(s.drafter_passes for s in stats), sum(s.drafter_busy_s for s in stats)
    if layers and layers_s:
        accepted = sum(s.accepted_tokens for s in stats)
        fields["mean_acceptance_length"] = round(1 + accepted / passes, 3)
        for name in ("hits", "late_hits", "misses"):
            own[name] = sum(getattr(s, name) for s in stats)
        own["hit_rate"] = round(min(1.0, (own["hits"] + own["late_hits"]) / passes), 4)
        own["drafter_layers_per_s"] = round(layers / layers_s, 2)
        own["ceiling_share"] = round(tokens_per_s(runs) / (layers / layers_s), 4)
        own["verified_per_emitted"] = round(verified / tokens, 3) if tokens else None
        own["acceptance_rate"] = round(accepted / verified, 4) if verified else None
        own["drafter_restarts"] = sum(s.drafter_restarts for s in stats)
    return {**fields, **own}


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
        "same text": same_text(line),
    }


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


def rich_table(lines: Sequence[dict[str, Any]], cells: Callable[[dict[str, Any]], dict[str, str]] = cells) -> Table:
    """Return the rows of one run as a table for the terminal; ``cells`` says what is shown of one."""
    first = lines[0]
    title = (
        f"{first['num_prompts']} prompts, {first['repeats']} repeats, {first['dtype']}, T = {first['temperature']:g}"
    )
    table = Table(title=title, caption=f"target costs {first['target_cost']}" if first["target_cost"] else None)
    for i, column in enumerate(cells(first)):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for line in lines:
        table.add_row(*cells(line).values())
    return table
