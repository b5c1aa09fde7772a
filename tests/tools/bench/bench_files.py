"""Bench files with made-up figures, as whole and valid as those of a real run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from card.engine.metrics import RequestStats
from card.tools.bench.records import Check, ModelPair, RowFacts, Run, Sample, Sampling, Workload, planned
from card.tools.bench.results import ResultsWriter

BASELINE = "vanilla-all-cores"
NUM_TOKENS = 40
# Row, its method, tokens a second, tokens a pass, and drafter passes a second: none without a draft model.
ROWS: tuple[tuple[str, str, float, float, float], ...] = (
    (BASELINE, "vanilla", 30.0, 1.0, 0.0),
    ("card", "card", 66.0, 3.2, 190.0),
    ("sps", "sps", 48.0, 2.9, 210.0),
    ("lookahead", "lookahead", 24.0, 1.2, 0.0),
)


def make_run(
    *,
    rows: tuple[tuple[str, str, float, float, float], ...] = ROWS,
    pairs: tuple[str, ...] = ("demo-90M",),
    workloads: tuple[str, ...] = ("gsm8k",),
    num_prompts: int = 2,
    repeats: int = 3,
    **changes: Any,
) -> Run:
    """Return a complete run whose texts are all the same and whose speeds scatter a little."""
    run = Run(
        run_id="run-1",
        version=1,
        command="card bench --pair demo --out results.jsonl <&>",
        commit="0123456789abcdef",
        date="2026-01-31T12:00:00Z",
        versions={"card": "0.1", "torch": "2.8"},
        machine={"cpu": "Some CPU", "cores": 2, "memory_gb": 7.8, "load_average": 0.1},
        pairs=tuple(
            ModelPair(
                name=name,
                target="demo-target",
                draft="demo-draft",
                target_cost="90M (inflated from 3.1M, same outputs)",
                target_parameters=90_000_000,
                draft_parameters=900_000,
            )
            for name in pairs
        ),
        dtype="float32",
        sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        max_tokens=NUM_TOKENS,
        repeats=repeats,
        rows=tuple(
            RowFacts(
                name=name,
                method=method,
                cores=(0, 1),
                threads=None,
                is_exact=True,
                is_comparable=name != "transformers",
                settings={},
            )
            for name, method, *_ in rows
        ),
        workloads=tuple(
            Workload(name=name, source="made up", num_prompts=num_prompts, turns=(1,) * num_prompts, prompts_sha256="0")
            for name in workloads
        ),
        baseline=BASELINE,
        status="complete",
    )
    rng = random.Random(0)
    speed_of = {name: (rate, length, layers) for name, _, rate, length, layers in rows}
    samples = tuple(_sample(key, speed_of[key.row], rng) for key in planned(run))
    checks = tuple(
        Check(
            pair=pair,
            row=row.name,
            workload=workload,
            num_texts=num_prompts * repeats,
            num_equal=num_prompts * repeats,
            near_ties=(),
            is_same=True,
        )
        for pair in pairs
        for row in run.rows
        for workload in workloads
    )
    return replace(run, samples=samples, checks=checks, **changes)


def write_run(path: Path, run: Run) -> Path:
    """Write a run as `card bench` does and return the path."""
    with ResultsWriter(path, run.run_id) as out:
        out.run(run)
        for item in (*run.samples, *run.checks):
            out.write(item)
        out.end(run.status)
    return path


def _sample(key: Any, speed: tuple[float, float, float], rng: random.Random) -> Sample:
    """Return one decode at about this speed: (tokens/s, tokens a pass, drafter passes/s)."""
    rate, length, layers_per_s = speed
    rate *= rng.uniform(0.94, 1.06)
    first_s = 0.2 * rng.uniform(0.9, 1.3)
    times, done = [(first_s, 1)], 1
    while done < NUM_TOKENS:
        new = min(NUM_TOKENS - done, max(1, round(rng.gauss(length, 0.8)))) if length > 1 else 1
        done += new
        times.append((times[-1][0] + new / rate * rng.uniform(0.7, 1.3), done))
    decode_s, passes = times[-1][0] - first_s, len(times) - 1
    accepted = NUM_TOKENS - 1 - passes
    depth = 0 if length == 1 else 6
    stats = RequestStats(
        num_prompt_tokens=50,
        num_new_tokens=NUM_TOKENS,
        prefill_s=first_s,
        wall_s=times[-1][0],
        target_passes=passes,
        target_busy_s=0.8 * decode_s,
        waited_s=0.05 * decode_s,
        verified_tokens=0 if length == 1 else 5 * passes,
        accepted_tokens=accepted,
        accepted_per_depth=[round(passes * 0.8 ** (d + 1)) for d in range(depth)],
        offered_per_depth=[round(passes * 0.95**d) for d in range(depth)],
        hits=round(0.4 * passes) if layers_per_s else 0,
        late_hits=round(0.2 * passes) if layers_per_s else 0,
        misses=round(0.4 * passes) if layers_per_s else 0,
        drafter_passes=round(layers_per_s * decode_s),
        drafter_busy_s=decode_s if layers_per_s else 0.0,
        drafter_dropped_nodes=round(0.6 * passes) if layers_per_s else 0,
        rolled_back_tokens=round(0.6 * passes) if layers_per_s else 0,
        schedule="beside" if layers_per_s else "off",
        schedule_reason="measured" if layers_per_s else "no drafter",
    )
    names = {name: getattr(key, name) for name in ("pair", "row", "workload", "prompt", "turn", "repeat")}
    return Sample(
        **names,
        new_tokens=NUM_TOKENS,
        token_ids=tuple(100 + (key.prompt + i) % 50 for i in range(NUM_TOKENS)),
        prefill_s=first_s,
        decode_s=decode_s,
        wall_s=times[-1][0],
        token_times=tuple(times),
        stats=stats if key.row != "transformers" else None,
        cpu_s=decode_s,
    )
