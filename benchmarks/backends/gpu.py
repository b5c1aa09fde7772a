"""How fast is CARD on a GPU, where the pair costs what large models cost?

    python benchmarks/backends/gpu.py --prompts gsm8k_test.jsonl --limit 20 --max-tokens 128 \
        --draft-cost 1B --target-costs 8B,30B --out gpu.jsonl

The built-in pair, inflated on the device: the outputs of a trained pair at the price of large models. All rows run on
the same weights in one process, greedily. Order, times, the comparison of texts and the file are those of `card bench`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
import torch
from loaded_pair import BASELINE, WARM_UP_TOKENS, LoadedPair, greedy, measure, shown
from rich.console import Console
from transformers import PreTrainedModel

from card import LLM
from card.backends.transformers.loading import load_model
from card.config import DraftSettings, parse_parameter_count
from card.errors import CardError, SettingsError
from card.models.facts import end_token_ids
from card.models.inflation import inflate
from card.tools.bench.environment import Environment, allowed_cores, describe_run
from card.tools.bench.lineup import fastest
from card.tools.bench.records import RowFacts, Run
from card.tools.bench.rows import CardRow, PromptIds, Row
from card.tools.bench.transformers_rows import TransformersRow

ROWS = (BASELINE, "sps", "card-chain", "card-tree", "transformers", "transformers-assisted")
_CHOOSING_PROMPTS = 2
_SPARE = 1.2  # memory asked for over that of the weights: KV rows, recorded passes, workspace
_PLACEMENTS = {"vanilla": None, "sps": "inline", "card-chain": "thread", "card-tree": "thread"}


class InflatedPair(LoadedPair):
    """One target, one draft, and the rows made of them."""

    def __init__(self, args: argparse.Namespace, target_cost: str, say: Callable[[str], None]) -> None:
        """Load and inflate both. Raises: CardError; SettingsError if the device has no room for them."""
        self._say = say
        self._llms: dict[str, LLM] = {}
        draft_device = args.draft_device or args.device
        costs: dict[str, list[str]] = {args.device: [target_cost]}
        costs.setdefault(draft_device, []).append(args.draft_cost)
        for device, asked in costs.items():
            check_memory(device, args.dtype, asked)
        target = load_inflated(args.target, target_cost, args.dtype, args.device)
        draft = load_inflated(args.draft, args.draft_cost, args.dtype, draft_device)
        super().__init__(args, pair_name(args, target_cost), target, draft)

    def close(self) -> None:
        """End the drafters and free the models."""
        super().close()
        self._llms.clear()
        del self._target, self._draft, self.judge
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def make_rows(self, prompts: PromptIds, chosen: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Return the rows, each warmed up; where a draft length is to be chosen, the fastest on the first prompts."""
        del chosen  # this script goes on with no run
        rows, params = [], greedy(self._args.max_tokens)
        for name in self._args.methods:
            self._say(f"preparing {name}")
            candidates = self._options(name)
            for option in candidates:
                option.decode(prompts[0], greedy(WARM_UP_TOKENS))
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
            if self._args.cuda_graphs:
                settings |= {"device": self._args.device, "cuda_graphs": True}
            draft = None
            if _PLACEMENTS[name] is not None:
                draft, settings["placement"] = self._draft, _PLACEMENTS[name]
                settings |= {"num_speculative_tokens": max(self._args.sps_lengths)} if method == "sps" else {}
            if method == "card":
                settings |= {"budget": self._args.budget, "beam_width": self._args.beam_width}
            self._llms[method] = self.make_llm(draft, **settings)
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
            settings={**devices, "placement": _PLACEMENTS.get(name), "cuda_graphs": args.cuda_graphs},
        )
        for name in args.methods
    )


def run_pairs(args: argparse.Namespace, environment: Environment, console: Console) -> Run:
    """Measure all prices of the target; return the run."""
    pairs = {pair_name(args, cost): partial(InflatedPair, args, cost) for cost in args.target_costs}
    return measure(args, pairs, row_facts(args), environment, console)


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
    facts = describe_run()
    facts = replace(facts, machine={**facts.machine, "gpus": describe_gpus(), "cuda": torch.version.cuda})
    return shown(run_pairs(args, facts, Console(stderr=True)))


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
    parser.add_argument("--draft-device", help="of the drafter (default: the target's)")
    parser.add_argument("--cuda-graphs", action="store_true", help="record passes; each worker has its own stream")
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
