"""The figures of a run as tables for the terminal; slowdowns are printed like gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from card.config import INT8
from card.tools.bench.records import Run
from card.tools.bench.row_names import ONE_CORE, OTHER_NUMBERS
from card.tools.bench.summary import RowSummary, ratio, summarise

_SHOWN_SHARE = 0.05  # least share of a writer that is shown
SPARE = ("tokens a pass", "vs one core", "range", "first, ms")  # on a narrow terminal, the last one first
_ON_TERMINAL = (  # unless all columns are asked for
    "method",
    "tokens/s",
    "range",
    "vs plain",
    "vs one core",
    "first, ms",
    "tokens a pass",
    "solved",
    "same number",
    "same text",
)


def shown(value: float | None, form: str) -> str:
    """Return a figure as text; a dash if there is none."""
    return "–" if value is None else format(value, form)


def row_title(run: Run, summary: RowSummary) -> str:
    """Return a row's name, with the draft length that was chosen for it as K."""
    settings: dict[str, Any] = run.settings_of(summary.group)
    if "assistant" in settings:
        return f"{summary.row} ({settings['assistant']})"
    length = settings.get("num_speculative_tokens")
    return f"{summary.row} K={length}" if length else summary.row


def same_text(run: Run, summary: RowSummary) -> str:
    """Return how a row's texts compare with the baseline's, in a word or two."""
    facts = run.facts_of(summary.row)
    if not facts.is_exact:
        return "not exact"
    check = run.check_of(summary.group)
    if not facts.is_comparable or check is None:
        return OTHER_NUMBERS
    if check.num_equal == check.num_texts:
        return "same bits" if run.dtype == INT8 else "yes"
    return f"{'near-ties' if check.is_same else 'NO'}: {check.num_texts - check.num_equal} of {check.num_texts} differ"


def accepted_from(summary: RowSummary) -> str:
    """Return the share of each writer in the accepted tokens, the largest first."""
    shares = summary.costs.accepted_by_writer or {}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= _SHOWN_SHARE) or "–"


def cells(run: Run, summary: RowSummary) -> dict[str, str]:
    """Return all that a table may show of a row, by column."""
    rate, costs = summary.tokens_per_s, summary.costs
    one_core = ratio(run, summary.row, ONE_CORE, pair=summary.pair, workload=summary.workload)
    speedup = summary.speedup
    return {
        "method": row_title(run, summary),
        "tokens/s": f"{rate.median:.1f}",
        "range": f"{rate.least:.1f}–{rate.most:.1f}",
        "vs plain": f"{speedup.median:.2f}" if speedup else "–",
        "range vs plain": f"{speedup.least:.2f}–{speedup.most:.2f}" if speedup else "–",
        "vs one core": f"{one_core.median:.2f}" if one_core else "–",
        "first, ms": f"{1e3 * summary.first_token.p50:.1f}" if summary.first_token else "–",
        "tokens a pass": shown(costs.mean_acceptance_length, ".2f"),
        "hit rate": shown(costs.hit_rate, ".0%"),
        "layers/s": shown(costs.drafter_layers_per_s, ".0f"),
        "of ceiling": shown(costs.ceiling_share, ".0%"),
        "pass, ms": shown(costs.target_pass_ms, ".2f"),
        "overhead, ms": shown(costs.round_overhead_ms, ".2f"),
        "verified per token": shown(costs.verified_per_emitted, ".2f"),
        "rolled back per token": shown(costs.rolled_back_per_emitted, ".2f"),
        "accepted from": accepted_from(summary),
        "solved": str(summary.solved or "–"),
        "same number": str(summary.same_number or "–"),
        "same text": same_text(run, summary),
    }


def groups(run: Run) -> list[list[RowSummary]]:
    """Return the rows that belong into one table: those of a pair and workload."""
    found: dict[tuple[str, str], list[RowSummary]] = {}
    for summary in summarise(run):
        found.setdefault((summary.pair, summary.workload), []).append(summary)
    return list(found.values())


def rich_tables(run: Run, *, is_wide: bool = False) -> list[Table]:
    """Return a table for each pair and workload of which something is complete; with all columns if it may be wide."""
    return [_rich_table(run, rows, is_wide=is_wide) for rows in groups(run)]


def _rich_table(run: Run, rows: Sequence[RowSummary], *, is_wide: bool) -> Table:
    first = rows[0]
    counts = f"prompts: {first.num_prompts}, repeats: {first.num_repeats} of {run.repeats}"
    title = f"{first.pair}, {first.workload}: {counts}, {run.dtype}, T = {run.sampling.temperature:g}"
    cost = run.pair_of(first.pair).target_cost
    caption = (
        f"medians over repeats of decoding, reading the prompt left out; first: to the first token; vs plain: "
        f"against {run.baseline} in the same repeat"
    )
    table = Table(
        title=title,
        caption=f"{caption}; target costs {cost}" if cost else caption,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    lines = [cells(run, row) for row in rows]
    asked = tuple(lines[0]) if is_wide else _ON_TERMINAL
    columns = [name for name in asked if name == "method" or any(line[name] != "–" for line in lines)]
    for name in columns:
        is_name = name == "method"
        head = name.replace(" ", "\n", 1)
        table.add_column(head, justify="left" if is_name else "right", no_wrap=True, vertical="bottom")
    for line in lines:
        table.add_row(*(line[name] for name in columns))
    return table
