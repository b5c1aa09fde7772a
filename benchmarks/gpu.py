"""How fast is CARD on a GPU, where the pair costs what large models cost?

    python benchmarks/gpu.py --prompts gsm8k_test.jsonl --limit 20 --max-tokens 128 \
        --draft-cost 1B --target-costs 8B,30B --out gpu.jsonl

The built-in pair, inflated on the device: the outputs of a trained pair at the price of large models. All rows run on
the same weights in one process, greedily. Order, times, the comparison of texts and the file are those of `card bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import options
import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from card import LLM, SamplingParams
from card.assembly.plan import readable
from card.config import DraftSettings
from card.errors import CardError, SettingsError
from card.models.facts import context_limit, end_token_ids, parameter_count
from card.models.inflation import inflate, inflated_from, parse_parameter_count
from card.models.loading import load_tokenizer
from card.theirs.transformers.loading import load_model
from card.tools.bench.compare import TextJudge
from card.tools.bench.environment import MEASURED_START, Environment, allowed_cores, describe_run, weights_fingerprint
from card.tools.bench.lineup import BenchPlan, fastest
from card.tools.bench.records import ModelPair, RowFacts, Run
from card.tools.bench.rows import CardRow, PromptIds, Row
from card.tools.bench.runner import run_bench
from card.tools.bench.tables import rich_tables
from card.tools.bench.transformers_rows import TransformersRow

BASELINE = "vanilla"
ROWS = (BASELINE, "sps", "card-chain", "card-tree", "transformers", "transformers-assisted")
_WARM_UP_TOKENS = 32  # long enough that the shapes of all passes are recorded
_CHOOSING_PROMPTS = 2
_MAX_MODEL_LEN = 4096
_INTERRUPTED = 130
_SPARE = 1.2  # memory asked for over that of the weights: KV rows, recorded passes, workspace
_PLACEMENTS = {"vanilla": None, "sps": "inline", "card-chain": "thread", "card-tree": "thread"}


class InflatedPair:
    """One target, one draft, and the rows made of them."""

    def __init__(self, args: argparse.Namespace, target_cost: str, say: Callable[[str], None]) -> None:
        """Load and inflate both. Raises: CardError; SettingsError if the device has no room for them."""
        self._args, self._target_cost, self._say = args, target_cost, say
        self._stack = contextlib.ExitStack()
        self._llms: dict[str, LLM] = {}
        self.tokenizer = load_tokenizer(args.target)
        draft_device = args.draft_device or args.device
        costs: dict[str, list[str]] = {args.device: [target_cost]}
        costs.setdefault(draft_device, []).append(args.draft_cost)
        for device, asked in costs.items():
            check_memory(device, args.dtype, asked)
        self._target = load_inflated(args.target, target_cost, args.dtype, args.device)
        self._draft = load_inflated(args.draft, args.draft_cost, args.dtype, draft_device)
        self.dtype = str(self._target.dtype).removeprefix("torch.")
        self.max_model_len = min(context_limit(self._target), _MAX_MODEL_LEN)
        self.judge = TextJudge(self._target, params_of(args))

    def close(self) -> None:
        """End the drafters and free the models."""
        self._stack.close()
        self._llms.clear()
        del self._target, self._draft, self.judge
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def pair_facts(self) -> ModelPair:
        """Return what the run says of the pair."""
        return ModelPair(
            name=pair_name(self._args, self._target_cost),
            target=self._args.target,
            draft=f"{self._args.draft}, {price(self._draft)}",
            target_cost=price(self._target),
            target_parameters=parameter_count(self._target),
            draft_parameters=parameter_count(self._draft),
            fingerprint=weights_fingerprint(self._target, self._draft),
        )

    def make_rows(self, prompts: PromptIds, chosen: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Return the rows, each warmed up; where a draft length is to be chosen, the fastest on the first prompts."""
        del chosen  # this script goes on with no run
        rows, params = [], params_of(self._args)
        for name in self._args.methods:
            self._say(f"preparing {name}")
            candidates = self._options(name)
            for option in candidates:
                option.decode(prompts[0], params.replace(max_tokens=_WARM_UP_TOKENS))
            rows.append(fastest(candidates, prompts[:_CHOOSING_PROMPTS], params))
        return rows

    def _options(self, name: str) -> list[Row]:
        """Return the row of this name, or one for each draft length to choose from."""
        lengths: list[int] = self._args.sps_lengths
        if name == "transformers":
            return [self._transformers_row(name)]
        if name == "transformers-assisted":
            tried = (None, *lengths)
            return [self._transformers_row(name, assistant=self._draft, num_assistant_tokens=n) for n in tried]
        llm = self._llm(name)
        if name == "sps":
            return [CardRow(name, llm, (), DraftSettings(num_speculative_tokens=length)) for length in lengths]
        if name == "vanilla":
            return [CardRow(name, llm, (), DraftSettings())]
        shape = {"verify": name.removeprefix("card-"), "budget": self._args.budget, "beam_width": self._args.beam_width}
        return [CardRow(name, llm, (), DraftSettings(min_verify_prob=self._args.min_verify_prob, **shape))]

    def _llm(self, name: str) -> LLM:
        """Return the LLM of a row; both rows of CARD share one."""
        method = name.partition("-")[0]
        if method not in self._llms:
            settings: dict[str, Any] = {"method": method, "policy": "fixed"}
            draft = None
            if _PLACEMENTS[name] is not None:
                draft, settings["placement"] = self._draft, _PLACEMENTS[name]
                settings |= {"num_speculative_tokens": max(self._args.sps_lengths)} if method == "sps" else {}
            if method == "card":
                settings |= {"budget": self._args.budget, "beam_width": self._args.beam_width}
            llm = LLM(self._target, draft, tokenizer=self.tokenizer, **readable(MEASURED_START, method), **settings)
            self._llms[method] = self._stack.enter_context(llm)
        return self._llms[method]

    def _transformers_row(self, name: str, **assistant: Any) -> Row:
        end_ids = end_token_ids(self._target, self.tokenizer)
        return TransformersRow(name, self._target, end_ids, allowed_cores(), **assistant)


def load_inflated(name: str, cost: str, dtype: str, device: str) -> PreTrainedModel:
    """Return a model on the device at the price of ``cost`` parameters."""
    return inflate(load_model(name, dtype=dtype, device=device), parse_parameter_count(cost))


def check_memory(device: str, dtype: str, costs: Sequence[str]) -> None:
    """Raise SettingsError if models of so many parameters do not fit into what the device has free."""
    if torch.device(device).type != "cuda":
        return
    needed = _SPARE * sum(parse_parameter_count(cost) for cost in costs) * getattr(torch, dtype).itemsize
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    if needed > free:
        raise SettingsError(
            f"models of {' and '.join(costs)} parameters take about {needed / 1e9:.0f} GB in {dtype}, and {device} has "
            f"{free / 1e9:.0f} GB free; leave that size out of --target-costs, or use --draft-device"
        )


def price(model: PreTrainedModel) -> str:
    """Return what an inflated model costs and what it is."""
    return f"{parameter_count(model) / 1e9:.2f}B (inflated from {(inflated_from(model) or 0) / 1e6:.1f}M, same outputs)"


def params_of(args: argparse.Namespace) -> SamplingParams:
    """Return how everything is decoded: greedily."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens).resolved()


def pair_name(args: argparse.Namespace, target_cost: str) -> str:
    """Return the name of a pair, its prices included."""
    return f"{Path(args.target).name}@{target_cost}+{Path(args.draft).name}@{args.draft_cost}"


def row_facts(args: argparse.Namespace) -> tuple[RowFacts, ...]:
    """Return what the run promises of its rows."""
    devices = {"device": args.device, "draft_device": args.draft_device or args.device}
    return tuple(
        RowFacts(
            name=name,
            method=name if name.startswith("transformers") else name.partition("-")[0],
            cores=allowed_cores(),
            threads=None,
            is_exact=True,
            is_comparable=True,
            settings={**devices, "placement": _PLACEMENTS.get(name)},
        )
        for name in args.methods
    )


def run_pairs(args: argparse.Namespace, environment: Environment, console: Console) -> Run:
    """Measure all prices of the target; return the run."""
    plan = BenchPlan(
        rows=row_facts(args),
        baseline=BASELINE,
        pairs={pair_name(args, cost): partial(InflatedPair, args, cost) for cost in args.target_costs},
        datasets=(options.prompt_set(args.prompts, args.limit),),
        params=params_of(args),
        repeats=args.repeats,
    )
    return run_bench(plan, environment, args.out, console)


def describe_gpus() -> list[dict[str, Any]]:
    """Return name, memory and compute capability of each CUDA device."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": one.name, "memory_gb": round(one.total_memory / 1e9, 1), "capability": f"{one.major}.{one.minor}"}
        for one in found
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns: 0, or 130 if it was interrupted."""
    args = parse_arguments(argv)
    if not torch.cuda.is_available():
        raise SettingsError(
            f"this benchmark needs a CUDA device, and torch {torch.__version__} sees none; run it where there is one, "
            "with a CUDA build of torch, or run card bench on this machine"
        )
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    facts = describe_run()
    facts = replace(facts, machine={**facts.machine, "gpus": describe_gpus(), "cuda": torch.version.cuda})
    run = run_pairs(args, facts, Console(stderr=True))
    for table in rich_tables(run):
        Console().print(table)
    return 0 if run.status == "complete" else _INTERRUPTED


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Raises: SettingsError for a value that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_model_options(parser)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    parser.add_argument("--limit", type=int, default=8, help="how many prompts (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each prompt and method (default: %(default)s)")
    parser.add_argument("--draft-cost", default="1B", help="parameters of the inflated draft (default: %(default)s)")
    parser.add_argument("--target-costs", default="8B,30B", help="of the inflated targets (default: %(default)s)")
    parser.add_argument("--device", default="cuda:0", help="of the target (default: %(default)s)")
    parser.add_argument("--draft-device", help="of the drafter (default: the target's, on a stream of its own)")
    parser.add_argument("--sps-lengths", type=options.numbers, default=[2, 3, 4, 6, 8, 12], help="to choose from")
    parser.add_argument("--budget", type=int, default=31, help="most candidates a verification (default: %(default)s)")
    parser.add_argument("--beam-width", type=int, default=8, help="nodes of a draft step (default: %(default)s)")
    parser.add_argument(
        "--min-verify-prob", type=float, default=0.02, help="of a candidate's path (default: %(default)s)"
    )
    parser.add_argument("--methods", default=",".join(ROWS), help="some of %(default)s")
    args = parser.parse_args(argv)
    args.target_costs = args.target_costs.split(",")
    for cost in (args.draft_cost, *args.target_costs):
        parse_parameter_count(cost)
    wanted = args.methods.split(",")
    if unknown := [name for name in wanted if name not in ROWS]:
        raise SettingsError(f"unknown method {unknown[0]!r}; known: {', '.join(ROWS)}")
    if args.dtype not in ("bfloat16", "float16", "float32"):
        raise SettingsError(f"--dtype must be bfloat16, float16 or float32, got {args.dtype}")
    if min(args.repeats, args.limit, args.max_tokens - 1, *args.sps_lengths) < 1:
        raise SettingsError("--repeats, --limit and --sps-lengths must be 1 or more, --max-tokens 2 or more")
    args.methods = [name for name in ROWS if name in wanted or name == BASELINE]  # plain always
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CardError as error:
        sys.exit(f"gpu.py: error: {error}")
