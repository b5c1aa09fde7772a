"""Does the planner say how fast each method is? Runs every method, and plans it from passes timed in between.

For each price of the target: plain decoding is recorded; then all rows decode prompt by prompt, as `card bench` lets
them. Before each decode a few passes of target and draft model are timed, so that whatever the machine does meets
runs and profiles alike. What the planner is told is these passes, the time around them and the recording; no figure
of a run. It runs each row over the same prompts, and a line says what was measured, and what was planned.

    python benchmarks/planner/planner_validation.py --prompts FILE.jsonl --target-cost 90M \\
        --out benchmarks/results/planner_validation.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import msgspec
import options
from busy_drafter import BUSY, BUSY_DRAFT, BusyDrafter
from pass_samples import DRAFT_TOKENS, TARGET_TOKENS, Known, Places, SampledModel, Sampler, make_profiles
from rich.console import Console
from validation_report import Rates, compared, parts_of, tables_of

from card.assembly.drafters import DraftSource
from card.assembly.latency.timing import measure_pass_cost
from card.assembly.plan import Facts, resolve
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.errors import CardError, SettingsError
from card.machine.threads import pinned
from card.models.protocol import LanguageModel
from card.models.runners import make_runner
from card.text.fit import tokenizer_fingerprint
from card.tools.bench import environment
from card.tools.bench.lineup import Lineup, LineupSettings, PairSpec
from card.tools.bench.row_names import BASELINE, names_of, spec_of
from card.tools.bench.rows import Decoded, Row, core_set
from card.tools.planner.overheads import measure_overheads
from card.tools.planner.profile import Profile
from card.tools.planner.recorder import RecordRequest, make_recording
from card.tools.planner.recording import Recording, TargetText
from card.tools.planner.scenario import Scenario
from card.tools.planner.simulate import Simulator, VirtualRun

_MEASURING_S = {"target": 1.0, "draft": 0.4}  # as long as the library does
_SPARE_ROWS = 256
_LEAST_REPEATS = 2  # whatever they take


@dataclass(frozen=True, slots=True)
class Job:
    """One price."""

    args: argparse.Namespace
    cost: str | None
    cores: tuple[int, ...]
    names: list[str]
    params: SamplingParams
    console: Console

    def say(self, text: str) -> None:
        """Show what is being done, and when."""
        self.console.print(f"{time.strftime('%H:%M:%S')} {self.cost or 'as it is'}: {text}", highlight=False)

    @property
    def lineup(self) -> LineupSettings:
        """What the rows have in common."""
        args = self.args
        shared = {"params": self.params, "cores": self.cores, "dtype": args.dtype}
        return LineupSettings(**shared, lengths=(args.length,), own={"hrad": args.hrad})


@dataclass(frozen=True, slots=True)
class Found:
    """What one price gave."""

    rows: Mapping[str, Row]
    decoded: Mapping[str, list[list[Decoded]]]  # by row: [repeat][prompt]
    recording: Recording
    profiles: tuple[Profile, Profile]
    target_cost: str | None

    @property
    def repeats(self) -> int:
        """Repeats that were made."""
        return len(self.decoded[BASELINE])


def measure(job: Job) -> Found:
    """Bring everything up, record, then sample and decode in turn."""
    args = job.args
    pair = PairSpec(target=args.target, draft=args.draft, target_cost=job.cost)
    with contextlib.ExitStack() as stack:
        lineup = Lineup(job.names, pair, job.lineup, job.say)
        stack.callback(lineup.close)
        prompts = options.encode_prompts(args.prompts, args.limit, lineup.tokenizer)
        rows = {row.name: row for row in lineup.make_rows(prompts, {})}
        job.say("recording")
        models = {
            "target": options.load_target(args.target, args.dtype, job.cost),
            "draft": load_model(args.draft, dtype=args.dtype),
        }
        runners = {
            name: make_runner(model, max_model_len=lineup.max_model_len, max_tree_rows=_SPARE_ROWS)
            for name, model in models.items()
        }
        recording = record(job, rows[BASELINE], prompts, runners, lineup)
        sampler, known = make_sampler(job, runners, recording, lineup, stack)
        gc.collect()
        gc.freeze()  # else all that so many engines hold is looked through in the middle of a decode
        stack.callback(gc.unfreeze)
        job.say("measuring")
        decoded: dict[str, list[list[Decoded]]] = {name: [] for name in rows}
        started = time.monotonic()
        for repeat in range(args.repeats):
            left_s = args.time_limit - (time.monotonic() - started)
            if repeat >= _LEAST_REPEATS and left_s < (time.monotonic() - started) / repeat:
                job.say(f"no time for more than {repeat} repeats")
                break
            for runs in decoded.values():
                runs.append([])
            for idx, prompt_ids in enumerate(prompts):
                order = [job.names[(idx + step) % len(rows)] for step in range(len(rows))]  # none is always the first
                for name in order:
                    sampler.take(repeat, num_kinds=-(-sampler.num_kinds // (len(rows) * len(prompts))))
                    decoded[name][repeat].append(rows[name].decode(prompt_ids, job.params))
        cost = lineup.pair_facts().target_cost
        profiles = make_profiles((args.target, args.draft), sampler, known)
    return Found(rows, decoded, recording, profiles, cost)


def record(
    job: Job,
    row: Row,
    prompts: Sequence[Sequence[int]],
    runners: Mapping[str, LanguageModel],
    lineup: Lineup,
) -> Recording:
    """Return what the pair does on the prompts, as plain decoding at this price answers them."""
    answers = []
    for prompt_ids in prompts:
        token_ids = row.decode(prompt_ids, job.params).token_ids
        is_stopped = token_ids[-1] in lineup.end_ids
        answers.append(TargetText(tuple(prompt_ids), token_ids, "stop" if is_stopped else "length"))
    request = RecordRequest(target=job.args.target, draft=job.args.draft, prompts=(), params=job.params)
    tokenizer = tokenizer_fingerprint(lineup.tokenizer)
    return make_recording(request, runners["target"], runners["draft"], answers, tokenizer)


def make_sampler(
    job: Job,
    runners: Mapping[str, LanguageModel],
    recording: Recording,
    lineup: Lineup,
    stack: contextlib.ExitStack,
) -> tuple[Sampler, tuple[Known, Known]]:
    """Return what times passes, and what is measured but once."""
    places = Places(job.cores[:-1], job.cores[-1:])
    lengths = [len(text.prompt_ids) + len(text.token_ids) // 2 for text in recording.texts]
    num_rows = round(statistics.mean(lengths))
    text = recording.texts[0].prompt_ids
    asked = {
        **environment.MEASURED_START,
        **BUSY,
        "dtype": job.args.dtype,
        "placement": "process",
        "cores": places.target,
        "draft_cores": places.draft,
        "max_model_len": lineup.max_model_len,
    }
    plan = resolve(asked, Facts(has_draft=True, cores=job.cores))
    job.say("starting a drafter to be kept busy")
    source = DraftSource(model=job.args.draft, vocab_size=recording.vocab_size, tokenizer=lineup.tokenizer)
    busy = BusyDrafter(plan, source, text)
    stack.callback(busy.close)
    known = []
    for what, runner in runners.items():
        costs = {}
        for cores in (places.target, places.all):
            with pinned(core_set(cores, len(cores))):
                runner.warm_up(BUSY_DRAFT.beam_width)
                costs[len(cores)] = measure_pass_cost(runner, clock=time.perf_counter, time_limit_s=_MEASURING_S[what])
        if what == "draft" and busy.cost is not None:
            costs[len(places.draft)] = busy.cost
        job.say(f"time around the passes of the {what}")
        with pinned(core_set(places.target, len(places.target))):
            is_draft = what == "draft"
            around = measure_overheads(runner, None if is_draft else lineup.tokenizer)
        known.append(Known(costs, around))
    sampled = [
        SampledModel(runners[what], num_rows, tokens)
        for what, tokens in (("target", TARGET_TOKENS), ("draft", DRAFT_TOKENS))
    ]
    return Sampler(*sampled, busy, places), (known[0], known[1])


# ---- what was planned -----------------------------------------------------------------------------------------------


def planned_settings(name: str, settings: LineupSettings) -> dict[str, Any]:
    """Return the settings of a row as the planner takes them."""
    spec = spec_of(name)
    if spec.is_tuned:
        return dict(spec.engine)
    found: dict[str, Any] = {"policy": "fixed", "threads": len(settings.cores_of(name)), **spec.draft}
    if spec.drafter in ("turns", "beside"):
        found["placement"] = {"turns": "inline", "beside": "process"}[spec.drafter]
    if spec.has_lengths:
        found["num_speculative_tokens"] = settings.lengths[0]
    return found


def plan_rows(job: Job, found: Found) -> list[dict[str, Any]]:
    """Return a line for each row, and one for the profiles."""
    recorded = [text.token_ids for text in found.recording.texts]
    planned = {name: run for name, run in zip(job.names, _planned_runs(job, found), strict=True)}
    rates = {
        name: Rates(_measured_rates(found.decoded[name]), _planned_rates(planned[name], found.repeats))
        for name in job.names
    }
    lines = []
    for name, run in planned.items():
        decoded = [one for repeat in found.decoded[name] for one in repeat]
        lines.append(
            {
                "kind": "row",
                "row": name,
                **compared(rates[name], rates[BASELINE]),
                "measured_parts": parts_of([one.stats for one in decoded if one.stats]),
                "planned_parts": parts_of(run.stats),
                "length": found.rows[name].settings.get("num_speculative_tokens"),
                "planned_length": run.num_speculative_tokens,
                "num_texts": len(decoded),
                "num_texts_equal": sum(
                    one.token_ids == text for one, text in zip(decoded, recorded * found.repeats, strict=True)
                ),
            }
        )
    told = {what: msgspec.to_builtins(one) for what, one in zip(("target", "draft"), found.profiles, strict=True)}
    return [*lines, {"kind": "profiles", **{f"{what}_profile": one for what, one in told.items()}}]


def _planned_runs(job: Job, found: Found) -> Iterator[VirtualRun]:
    """Yield what the planner makes of each row, over the prompts in the order in which they were decoded."""
    target, draft = found.profiles
    texts = list(range(len(found.recording.texts))) * found.repeats
    simulators: dict[int, Simulator] = {}
    for name in job.names:
        job.say(f"planning {name}")
        spec = spec_of(name)
        num_cores = len(job.cores) if spec.drafter == "beside" else len(job.lineup.cores_of(name))
        if num_cores not in simulators:
            scenario = Scenario(target=target, draft=draft, recording=found.recording, cores=num_cores)
            simulators[num_cores] = Simulator(scenario)
        yield simulators[num_cores].run(spec.method, planned_settings(name, job.lineup), text_idxs=texts)


def _measured_rates(repeats: Sequence[Sequence[Decoded]]) -> list[float]:
    return [sum(one.decode_tokens for one in runs) / sum(one.decode_s for one in runs) for runs in repeats]


def _planned_rates(run: VirtualRun, num_repeats: int) -> list[float]:
    """Return tokens/s of each repeat."""
    count = len(run.stats) // num_repeats
    repeats = [run.stats[first : first + count] for first in range(0, len(run.stats), count)]
    return [sum(one.num_new_tokens - 1 for one in stats) / sum(one.decode_s for one in stats) for stats in repeats]


# ---- the command ----------------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for values that make no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_model_options(parser)
    parser.add_argument("--limit", type=int, default=3, help="how many prompts (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of all prompts, if time allows (default: %(default)s)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=240.0,
        help=f"seconds of measuring at a price; fewer repeats are made if need be, {_LEAST_REPEATS} at least "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--target-cost",
        action="append",
        help="price of the target in parameters, such as 90M, or none for its own; several one after the other",
    )
    parser.add_argument("--rows", default="rivals", help="rows of card bench, with commas (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=6, help="draft length of sps and ouroboros (default: %(default)s)"
    )
    parser.add_argument("--hrad", default="off", help="predictor of specbranch: off, demo or a file")
    parser.add_argument("--cores", help="all cores, the last one the drafter's, such as 0,1 (default: first and last)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    args = parser.parse_args(argv)
    if args.repeats < 1 or args.limit < 1 or args.max_tokens < 2:
        raise SettingsError(
            "--repeats and --limit must be 1 or more and --max-tokens 2 or more, got "
            f"{args.repeats}, {args.limit} and {args.max_tokens}"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and plan at each price. Returns the exit status."""
    console = Console(stderr=True)
    try:
        args = parse_arguments(argv)
        names = names_of([name for name in args.rows.split(",") if name])
        cores = environment.choose_cores(tuple(options.numbers(args.cores)) if args.cores else None)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens).resolved()
        lines = []
        for cost in args.target_cost or ["none"]:
            facts = options.describe_run()
            job = Job(args, None if cost == "none" else cost, cores, names, params, console)
            found = measure(job)
            gc.collect()  # one pair's memory before the next one's
            shared = {
                "benchmark": "planner_validation",
                "target": args.target,
                "draft": args.draft,
                "price": cost,
                "target_cost": found.target_cost,
                "dtype": args.dtype if args.dtype != "auto" else found.recording.dtype,
                "num_prompts": len(found.recording.texts),
                "repeats": found.repeats,
                "max_tokens": args.max_tokens,
                "temperature": 0.0,
                "seed": 0,
            }
            new = [{**shared, **line, **facts} for line in plan_rows(job, found)]
            options.append_lines(args.out, new)
            lines += new
            del found
            gc.collect()
    except CardError as error:
        console.print(f"planner_validation.py: error: {error}", soft_wrap=True)
        return 2
    print(tables_of(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
