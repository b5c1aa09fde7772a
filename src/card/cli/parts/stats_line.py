"""The figures of one request in a line: its costs, the shape of its drafts, and who proposed what was accepted."""

from __future__ import annotations

from collections.abc import Mapping

from card.drafting.local import find_writer, writer_names
from card.engine.metrics import RequestStats
from card.engine.offers import DRAFTER, GRAMMAR

_KINDS = _DRAFTED, _COPIED, _FORCED, _OTHER = "drafted", "copied", "forced", "of other writers"


def stats_line(method: str, stats: RequestStats, target_cost: str | None) -> str:
    """Return the figures of one request in a line or two."""
    parts = [
        f"{method}: {stats.num_new_tokens} tokens, {stats.decode_tokens_per_s:.1f} tokens/s",
        f"prefill {stats.prefill_s:.2f} s",
        f"{stats.target_passes} target passes",
    ]
    if stats.verified_tokens:
        parts.append(f"{stats.mean_acceptance_length:.2f} tokens a pass")
    if stats.drafter_passes:
        parts += [
            f"hit rate {stats.hit_rate:.0%}",
            f"{stats.drafter_passes} drafter passes at {stats.drafter_layers_per_s:.0f}/s",
            f"{stats.ceiling_share:.0%} of the ceiling",
        ]
    if stats.verified_by_writer and stats.drafter == "none":
        earned = sorted(stats.accepted_by_writer.items(), key=lambda pair: -pair[1])
        parts.append("accepted from " + (", ".join(f"{name} {count}" for name, count in earned) or "no writer"))
    elif stats.verified_by_writer:
        parts.append(accepted_in_words(stats))
    if stats.drafter != "none":
        is_off = stats.schedule == "off"
        parts.append(f"speculation off ({stats.schedule_reason})" if is_off else f"schedule {stats.schedule}")
        if shape := shape_in_words(stats):
            parts.append(f"drafted {shape}")
    if not stats.is_exact:
        parts.append(f"not exact: {stats.lenient_tokens} tokens against the target's choice")
    if stats.reused_prompt_tokens:
        parts.append(f"{stats.reused_prompt_tokens} prompt tokens reused")
    if stats.drafter not in ("none", "up"):
        parts.append(f"drafter {stats.drafter_state}")
    if stats.drafter_restarts:
        parts.append(f"drafter replaced {stats.drafter_restarts} times")
    line = ", ".join(parts)
    return f"{line}\ntarget costs {target_cost}" if target_cost else line


def shape_in_words(stats: RequestStats) -> str:
    """Return whether the draft model's candidates were mostly a chain or a tree; empty if it had none."""
    most, few = sorted((stats.drafted_chains, stats.drafted_trees), reverse=True)
    return f"a {stats.draft_shape}{f' in {most} of {most + few} passes' * (few > 0)}" if most else ""


def accepted_in_words(stats: RequestStats) -> str:
    """Return which share of the accepted candidates the draft model wrote and which was copied, with the writers.

    What the draft model and another writer both proposed counts as drafted.
    """
    groups: dict[str, dict[str, int]] = {kind: {} for kind in _KINDS}
    for label, count in sorted(stats.accepted_by_writer.items(), key=lambda one: -one[1]):
        groups[_kind(label)][label] = count
    shares = [
        f"{sum(counts.values()) / stats.accepted_tokens:.0%} {kind} ({_counts(counts)})"
        for kind, counts in groups.items()
        if counts
    ]
    return f"accepted {stats.accepted_tokens}" + (": " + ", ".join(shares) if shares else "")


def _kind(label: str) -> str:
    names = frozenset(label.split("+"))
    if DRAFTER in names:
        return _DRAFTED
    if any(find_writer(name).copies for name in names.intersection(writer_names())):
        return _COPIED
    return _FORCED if GRAMMAR in names else _OTHER


def _counts(accepted: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in accepted.items())
