"""The benchmark scripts as modules, and what they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = (
    "accuracy",
    "arbitrage",
    "closed_loop",
    "busy_drafter",
    "concurrency",
    "draft_server",
    "draft_window",
    "edge",
    "edge_agents",
    "gpu",
    "hivis",
    "judges",
    "load_report",
    "options",
    "packed",
    "pages",
    "pass_samples",
    "planner_validation",
    "plot",
    "plot_frontier",
    "plot_validation",
    "programs",
    "policy_cells",
    "policy_gate",
    "policy_texts",
    "ray_pool",
    "round_overheads",
    "series",
    "served",
    "server_overhead",
    "starts",
    "table",
    "toy_vision",
    "validation_report",
    "vllm_plugin",
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the result lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
