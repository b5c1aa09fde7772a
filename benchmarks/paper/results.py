"""The lines that the scripts here write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loop import Counts, LoopSettings

from card.tools.bench.environment import describe_run


def run_facts() -> dict[str, Any]:
    """Return what every line says of its run."""
    facts = describe_run()
    return {
        "started": facts.date,
        "command": facts.command,
        "commit": facts.commit,
        "versions": facts.versions,
        "machine": facts.machine,
    }


def loop_facts(settings: LoopSettings, counts: Counts) -> dict[str, Any]:
    """Return what a line says of one run of the loop."""
    draft = settings.draft
    return {
        "variant": settings.variant,
        "beam_width": settings.beam_width,
        "layers_per_round": settings.layers_per_round,
        "branch": draft.branch,
        "lead": draft.lead,
        "tokens_per_pass": round(counts.tokens_per_pass, 4),
        "hit_rate": round(counts.hit_rate, 4),
        "zero_rate": round(counts.zero_rate, 4),
        "counts": asdict(counts),
    }


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line of JSON; the folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
