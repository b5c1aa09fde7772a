"""Does the planner say how fast methods with a drafter of their own are? Measures them, and plans them.

    python benchmarks/plan_own_drafters.py --draft demo-pard --ctc ctc.safetensors --prompts gsm8k_test.jsonl \\
        --out plan_own_drafters.jsonl

The texts are recorded once. Then all methods decode them in turns on one core, and before each decode passes of target
and draft model are timed. What the planner is told is the shortest of these passes, the time around them and the
recording; no figure of a run. Of each method's decodes the shortest counts: others compute beside.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from options import append_lines, describe_run

from card import LLM, SamplingParams
from card.assembly.latency.timing import measure_pass_cost
from card.engine.metrics import RequestStats
from card.machine.pass_cost import PassCost
from card.methods import find_method
from card.models.inflation import inflate, parse_parameter_count
from card.models.loading import load_model, load_tokenizer
from card.models.runners import make_runner
from card.text.prompts import encode_chat
from card.tools.planner.overheads import measure_overheads
from card.tools.planner.profile import PassTable, Profile, Setup
from card.tools.planner.recorder import RecordRequest, record
from card.tools.planner.scene import Scene
from card.tools.planner.simulate import Simulator

METHODS = ("vanilla", "pard", "ctc", "sparsespec", "specpv")
_MEASURING_S = 0.8
_SIZES = (1, 2, 4, 8, 16, 32)  # tokens of the passes that the planner is told of


def settings_of(method: str, selection: str) -> dict[str, Any]:
    """Return the settings of a method, as engine and planner take them."""
    own: dict[str, Any] = {"policy": "fixed", "threads": 1}
    if find_method(method).needs_draft:
        own["placement"] = "inline"
    return own | ({"kv_selection": selection} if find_method(method).selection is not None else {})


def least(costs: list[PassCost]) -> PassTable:
    """Return the shortest of several measurements of each pass."""
    points = tuple((size, min(cost.seconds(size) for cost in costs)) for size in _SIZES)
    rest = {name: min(getattr(cost, name) for cost in costs) for name in ("per_sequence_s", "per_context_row_s")}
    return PassTable(points=points, **rest)


def parts_of(stats: Sequence[RequestStats]) -> dict[str, float]:
    """Return where the seconds of decoding went."""
    passes_s, waited_s = sum(one.target_busy_s for one in stats), sum(one.waited_s for one in stats)
    around_s = sum(one.decode_s for one in stats) - passes_s - waited_s
    return {name: round(s, 4) for name, s in (("passes", passes_s), ("drafter", waited_s), ("around", around_s))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--draft", required=True, help="folder of card train pard")
    parser.add_argument("--ctc", required=True, help="head of card train ctc")
    parser.add_argument("--target-cost", default="90M")
    parser.add_argument("--kv-selection", default="sparse:0.1:48")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a question each")
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run, tokenizer = describe_run(), load_tokenizer(args.target)
    questions = [json.loads(line)["question"] for line in args.prompts.read_text("utf-8").splitlines()[: args.limit]]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens, ignore_eos=True).resolved()
    own: dict[str, Any] = {"ctc": args.ctc, "kv_selection": args.kv_selection, "methods": METHODS[1:]}
    prompts = [tuple(encode_chat(tokenizer, [{"role": "user", "content": question}])) for question in questions]
    recording = record(RecordRequest(target=args.target, draft=args.draft, prompts=prompts, params=params, **own))
    models: dict[str, Any] = {name: load_model(getattr(args, name)) for name in ("target", "draft")}
    models["target"] = inflate(models["target"], parse_parameter_count(args.target_cost))
    runners = {name: make_runner(model, max_model_len=512, max_tree_rows=256) for name, model in models.items()}
    around = {
        "target": measure_overheads(runners["target"], tokenizer, ctc=args.ctc),
        "draft": measure_overheads(runners["draft"]),
    }
    costs: dict[str, list[PassCost]] = {name: [] for name in runners}
    measured: dict[str, list[float]] = {method: [] for method in METHODS}
    stats: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        llms = {}
        for method in METHODS:
            used = [models["target"], models["draft"]] if find_method(method).needs_draft else [models["target"]]
            head = {"ctc": args.ctc} if find_method(method).needs_head else {}
            settings = settings_of(method, args.kv_selection) | head
            one = LLM(
                *used, tokenizer=tokenizer, method=method, max_num_seqs=1, max_model_len=512, cache=False, **settings
            )
            llms[method] = stack.enter_context(one)
        for _ in range(args.repeats):
            for method, llm in llms.items():
                for name, runner in runners.items():
                    found = measure_pass_cost(runner, clock=time.perf_counter, time_limit_s=_MEASURING_S)
                    costs[name].append(found)
                outputs = llm.generate([list(prompt) for prompt in prompts], params)
                seconds = sum(one.stats.decode_s for one in outputs)
                if seconds < min(measured[method], default=math.inf):
                    stats[method] = [one.stats for one in outputs]
                measured[method].append(seconds)
    profiles = {
        name: Profile(
            name=name,
            measured=True,
            source=run["command"],
            overheads=around[name],
            setups=(Setup(threads=1, cost=least(costs[name])),),
        )
        for name in runners
    }
    simulator = Simulator(Scene(**profiles, recording=recording))
    for method in METHODS:
        planned, seconds = simulator.run(method, settings_of(method, args.kv_selection)), min(measured[method])
        line = {
            "method": method,
            "target_cost": args.target_cost,
            "tokens": planned.num_tokens,
            "measured s": [round(one, 4) for one in measured[method]],
            "planned s": round(planned.decode_s, 4),
            "planned over measured": round(planned.decode_s / seconds, 3),
            "measured parts": parts_of(stats[method]),
            "planned parts": parts_of(planned.stats),
            "measured passes": sum(one.target_passes + one.self_draft_passes for one in stats[method]),
            "planned passes": sum(one.target_passes + one.self_draft_passes for one in planned.stats),
        }
        print(json.dumps(line), flush=True)
        append_lines(args.out, [{**line, **run}])


if __name__ == "__main__":
    main()
