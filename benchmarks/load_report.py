"""Figures and tables of `concurrency.py`: loads in, plain values for JSON out, and tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from card.tools.bench.records import first_difference
from card.tools.bench.tables import shown

if TYPE_CHECKING:
    from closed_loop import Load

    from card.tools.bench.compare import TextJudge

FIXED = "card, fixed settings"
_KINDS = {"beside": FIXED, "turns": FIXED}
_ON_TERMINAL = (
    "row",
    "tokens/s",
    "vs vanilla",
    "p50, s",
    "p90, s",
    "first, ms",
    "tokens a pass",
    "schedule",
    "text",
)


TokenIds = tuple[int, ...]


def first_differences(
    judge: TextJudge, prompts: Sequence[Sequence[int]], pairs: Sequence[tuple[int, TokenIds, TokenIds]]
) -> list[dict[str, Any]]:
    """Return each distinct first difference once, with the logit gap between the two tokens.

    Args:
        prompts: token ids of all prompts.
        pairs: index of the prompt, the text in question, and plain decoding's.
    """
    found: dict[tuple[int, int, int | None, int | None], dict[str, Any]] = {}
    for prompt_idx, ids, plain in pairs:
        position = first_difference(ids, plain)
        if position is None:
            continue
        own, other = (text[position] if position < len(text) else None for text in (ids, plain))
        gap = judge.gap(prompts[prompt_idx], ids, plain, position)
        found[prompt_idx, position, own, other] = {
            "prompt": prompt_idx,
            "position": position,
            "token_id": own,
            "plain_token_id": other,
            "logit_gap": gap.logits,
            "is_near_tie": gap.is_near_tie,
        }
    return list(found.values())


def comparison_fields(differences: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how the texts compare with plain decoding's."""
    return {
        "outputs_equal": not differences,
        "differences_are_near_ties": all(difference["is_near_tie"] for difference in differences),
        "first_differences": list(differences),
    }


def same_text(line: dict[str, Any]) -> str:
    """Return in a word or two how a row's texts compare with plain decoding's."""
    if line["outputs_equal"]:
        return "yes"
    prompts = len({difference["prompt"] for difference in line["first_differences"]})
    kind = "near-ties" if line["differences_are_near_ties"] else "NO,"
    return f"{kind} in {prompts} of {line['num_prompts']}"


def kind_of(family: str) -> str:
    """Return what a row competes in: CARD's fixed settings with one another, whatever their schedule."""
    return _KINDS.get(family, family)


def tokens_per_s(load: Load) -> float:
    """Return the new tokens of all requests per second, from the first submission to the end of the last request."""
    return load.num_tokens / load.wall_s


def counting(loads: Sequence[Load]) -> Sequence[Load]:
    """Return the runs that figures are made of: without the first one, which chose the rows, if there are others."""
    return loads[1:] or loads


def ratio(own: Sequence[Load], other: Sequence[Load]) -> float:
    """Return the median over repeats of one row's throughput against another's in the same repeat."""
    common = min(len(own), len(other))
    pairs = zip(counting(own[:common]), counting(other[:common]), strict=True)
    return round(statistics.median(tokens_per_s(a) / tokens_per_s(b) for a, b in pairs), 3)


def best_of_each_kind(kinds: Mapping[str, str], runs: Mapping[str, Sequence[Load]], count: int) -> set[str]:
    """Return the ``count`` rows of each kind whose first run gave most tokens per second."""
    ranked = sorted(kinds, key=lambda name: tokens_per_s(runs[name][0]), reverse=True)
    taken: Counter[str] = Counter()
    best = set()
    for name in ranked:
        if taken[kinds[name]] < count:
            taken[kinds[name]] += 1
            best.add(name)
    return best


def load_fields(loads: Sequence[Load]) -> dict[str, Any]:
    """Return what a row's runs came to; latencies are over the requests of all runs that count."""
    counted = counting(loads)
    rates = [tokens_per_s(load) for load in counted]
    served = [one for load in counted for one in load.served]
    stats = [one.stats for one in served]
    latencies, firsts = [one.latency_s for one in served], [one.first_token_s for one in served]
    passes, accepted = sum(s.target_passes for s in stats), sum(s.accepted_tokens for s in stats)
    verified, decoded = sum(s.verified_tokens for s in stats), sum(s.num_new_tokens - 1 for s in stats)
    prompt_tokens = sum(s.num_prompt_tokens for s in stats)
    return {
        "tokens_per_s": round(statistics.median(rates), 2),
        "range": [round(min(rates), 2), round(max(rates), 2)],
        "tokens_per_s_runs": [round(rate, 2) for rate in rates],
        "tokens_per_s_first_run": round(tokens_per_s(loads[0]), 2),  # which chose the rows that ran again
        "full_load_tokens_per_s": round(statistics.median(load.full_tokens / load.full_s for load in counted), 2),
        "num_tokens": counted[0].num_tokens,
        "latency_p50_s": round(quantile(latencies, 0.5), 4),
        "latency_p90_s": round(quantile(latencies, 0.9), 4),
        "first_token_p50_s": round(quantile(firsts, 0.5), 4),
        "mean_acceptance_length": round(1 + accepted / passes, 3) if passes else None,
        "verified_per_emitted": round(verified / decoded, 3) if decoded else None,
        "cores_used": round(sum(load.cpu_s for load in counted) / sum(load.wall_s for load in counted), 2),
        "schedules": shares(sum((load.schedules for load in counted), Counter())),
        "reason": counted[-1].reason,
        "drafter_restarts": sum(s.drafter_restarts for s in stats),
        "drafter_reused_share": round(sum(s.drafter_reused_tokens for s in stats) / prompt_tokens, 3),  # of prompts
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below or at which this share of the values lies, between two of them in proportion."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def shares(counts: Counter[str]) -> dict[str, float]:
    """Return each count as a share of their sum, the largest first."""
    total = sum(counts.values())
    return {name: round(count / total, 3) for name, count in counts.most_common()}


def summary(
    families: Mapping[str, str], runs: Mapping[str, Sequence[Load]], concurrency: int, lines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return how the tuned policy does against the best of the others; None where there are no rows to compare."""
    rates = {line["row"]: line["tokens_per_s"] for line in lines}
    most_runs = max(len(loads) for loads in runs.values())
    finalists = [name for name in families if len(runs[name]) == most_runs]

    def best(among: Sequence[str]) -> str | None:
        return max(among, key=lambda name: rates[name], default=None)

    rivals: dict[str, str | None] = {
        "vanilla": "vanilla",
        "best_sps": best([name for name in finalists if families[name] == "sps"]),
        "best_fixed": best([name for name in finalists if kind_of(families[name]) == FIXED]),
        "best_other": best([name for name in finalists if name != "card"]),
    }
    own = runs.get("card")
    return {
        "benchmark": "concurrency",
        "kind": "summary",
        "concurrency": concurrency,
        "card_tokens_per_s": rates.get("card"),
        "schedules": next((line["schedules"] for line in lines if line["row"] == "card"), None),
        **{kind: {"row": name, "tokens_per_s": rates[name]} if name else None for kind, name in rivals.items()},
        **{f"card_vs_{kind}": ratio(own, runs[name]) if own and name else None for kind, name in rivals.items()},
    }


def row_cells(line: dict[str, Any]) -> dict[str, str]:
    """Return what a table shows of a row, by column."""
    low, high = line["range"]
    return {
        "row": line["row"],
        "runs": f"{len(line['tokens_per_s_runs'])} × {line['num_prompts']}",  # times the requests of one
        "tokens/s": f"{line['tokens_per_s']:.0f}",
        "range": f"{low:.0f}–{high:.0f}",
        "at full load": f"{line['full_load_tokens_per_s']:.0f}",
        "vs vanilla": f"{line['speedup_vanilla']:.2f}",
        "p50, s": f"{line['latency_p50_s']:.2f}",
        "p90, s": f"{line['latency_p90_s']:.2f}",
        "first, ms": f"{1e3 * line['first_token_p50_s']:.0f}",
        "tokens a pass": shown(line["mean_acceptance_length"], ".2f"),
        "verified per token": shown(line["verified_per_emitted"], ".2f"),
        "schedule": shown_shares(line["schedules"]),
        "text": same_text(line),
    }


def summary_cells(line: dict[str, Any]) -> dict[str, str]:
    """Return what a table shows of one concurrency, by column."""

    def rival(kind: str) -> str:
        found = line[kind]
        return f"{found['tokens_per_s']:.0f} ({found['row']})" if found else "–"

    return {
        "at once": str(line["concurrency"]),
        "vanilla": f"{line['vanilla']['tokens_per_s']:.0f}",
        "best sps": rival("best_sps"),
        "best fixed": rival("best_fixed"),
        "card": shown(line["card_tokens_per_s"], ".0f"),
        "schedule": shown_shares(line["schedules"] or {}),
        "/ vanilla": shown(line["card_vs_vanilla"], ".2f"),
        "/ sps": shown(line["card_vs_best_sps"], ".2f"),
        "/ fixed": shown(line["card_vs_best_fixed"], ".2f"),
        "/ best": shown(line["card_vs_best_other"], ".2f"),
    }


def shown_shares(schedules: Mapping[str, float]) -> str:
    """Return "beside 90 %, off 10 %"; the name alone if there is but one."""
    if len(schedules) == 1:
        return next(iter(schedules))
    return ", ".join(f"{name} {share:.0%}" for name, share in schedules.items()) or "–"


def rich_table(lines: Sequence[dict[str, Any]]) -> Table:
    """Return the rows of one concurrency as a table for the terminal."""
    rows = [line for line in lines if line["kind"] == "row"]
    first = rows[0]
    title = f"{first['concurrency']} at a time, {first['num_prompts']} requests, {first['dtype']}"
    cells = [{name: row_cells(line)[name] for name in _ON_TERMINAL} for line in rows]
    return _table(title, first["target_cost"], cells)


def rich_summary(lines: Sequence[dict[str, Any]]) -> Table:
    """Return the summary over all concurrencies as a table for the terminal."""
    summaries = [line for line in lines if line["kind"] == "summary"]
    return _table("tokens/s by requests in flight", lines[0]["target_cost"], [summary_cells(s) for s in summaries])


def _table(title: str, target_cost: str | None, cells: Sequence[dict[str, str]]) -> Table:
    table = Table(title=title, caption=f"target costs {target_cost}" if target_cost else None)
    for i, column in enumerate(cells[0]):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*row.values())
    return table
