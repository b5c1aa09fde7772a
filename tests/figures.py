"""Laws between the figures of a request and of a server: shares are shares, and parts add up."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from card.engine.metrics import RequestStats

SHARES = ("acceptance_rate", "hit_rate", "ceiling_share", "target_busy_share")
_PARTS_OF = {  # a counter, and one that it is a part of
    "accepted_tokens": "verified_tokens",
    "lenient_tokens": "accepted_tokens",
    "reused_prompt_tokens": "num_prompt_tokens",
    "drafter_reused_tokens": "num_prompt_tokens",
    "hidden_prompt_tokens": "num_prompt_tokens",
    "rolled_back_tokens": "drafter_dropped_nodes",
    "prefill_s": "wall_s",
    "target_busy_s": "decode_s",
    "waited_s": "decode_s",
}


def check_figures(stats: Mapping[str, Any], *, has_clock: bool = True) -> None:
    """Check the figures of a finished request, as `RequestStats.as_dict` gives them.

    Args:
        has_clock: times are real ones.
    """
    timed = (
        () if has_clock else ("ceiling_share", "target_busy_share", *(name for name in _PARTS_OF if name[-2:] == "_s"))
    )
    for name, value in stats.items():
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
            assert isinstance(one, str | bool) or one >= 0 or name == "round_overhead_ms", (name, value)
    for name in SHARES:
        assert name in timed or 0.0 <= stats[name] <= 1.0, (name, stats[name])
    for name, whole in _PARTS_OF.items():
        assert name in timed or stats[name] <= stats[whole] + 1e-9, (name, stats[name], whole, stats[whole])
    assert stats["hits"] + stats["late_hits"] <= stats["target_passes"]
    assert sum(stats["verified_by_writer"].values()) == stats["verified_tokens"]
    assert sum(stats["accepted_by_writer"].values()) == stats["accepted_tokens"]
    for writer, count in stats["accepted_by_writer"].items():
        assert count <= stats["verified_by_writer"][writer], writer
    assert sum(stats["accepted_per_depth"]) == stats["accepted_tokens"]
    offered = [stats["target_passes"], *stats["offered_per_depth"]]
    assert all(later <= before for before, later in pairwise(offered)), offered
    for kept, num_offered in zip(stats["accepted_per_depth"], stats["offered_per_depth"], strict=False):
        assert kept <= num_offered
    assert stats["num_new_tokens"] <= 1 + stats["target_passes"] + stats["accepted_tokens"]


def check_request(stats: RequestStats, *, has_clock: bool = True) -> None:
    """Check the figures of a finished request."""
    check_figures(stats.as_dict(), has_clock=has_clock)


def check_metrics(values: Mapping[tuple[str, str], float], *, is_idle: bool) -> None:
    """Check the samples of `/metrics`, by name and own label."""

    def parts(name: str) -> float:
        return sum(value for (of, label), value in values.items() if of == name and label)

    for name in ("kv_cache_usage", "drafter_busy_share", "drafter_up", "engine_up", "speculating"):
        assert 0.0 <= values.get((f"card_{name}", ""), 0.0) <= 1.0, name
    for whole, by in (
        ("card_candidates_verified_total", "card_candidates_verified_by_writer_total"),
        ("card_candidates_accepted_total", "card_candidates_accepted_by_writer_total"),
        ("card_candidates_accepted_total", "card_candidates_accepted_per_position_total"),
        ("card_verifications_total", "card_lookup_results_total"),
    ):
        assert parts(by) == values[whole, ""], (by, parts(by), values[whole, ""])
    for part, whole in (
        ("card_prompt_tokens_reused_total", "card_prompt_tokens_total"),
        ("card_candidates_accepted_total", "card_candidates_verified_total"),
        ("card_prefix_cache_hits_total", "card_prefix_cache_queries_total"),
    ):
        assert values[part, ""] <= values[whole, ""], (part, whole)
    if is_idle:
        for name in ("requests_running", "requests_waiting", "requests_inside", "drafter_lead", "tree_nodes"):
            assert values[f"card_{name}", ""] == 0.0, name
