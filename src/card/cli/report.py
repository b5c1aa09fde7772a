"""How statistics read on a terminal."""

from __future__ import annotations

from card.workers.metrics import RequestStats


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
    if stats.verified_by_writer:
        earned = sorted(stats.accepted_by_writer.items(), key=lambda pair: -pair[1])
        parts.append("accepted from " + (", ".join(f"{name} {count}" for name, count in earned) or "no writer"))
    if stats.drafter != "none":
        is_off = stats.schedule == "off"
        parts.append(f"speculation off ({stats.schedule_reason})" if is_off else f"schedule {stats.schedule}")
    if stats.reused_prompt_tokens:
        parts.append(f"{stats.reused_prompt_tokens} prompt tokens reused")
    if stats.drafter not in ("none", "up"):
        parts.append(f"drafter {stats.drafter_state}")
    if stats.drafter_restarts:
        parts.append(f"drafter replaced {stats.drafter_restarts} times")
    line = ", ".join(parts)
    return f"{line}\ntarget costs {target_cost}" if target_cost else line
