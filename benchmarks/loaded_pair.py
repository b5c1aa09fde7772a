"""Rows of a script's own on a pair that it loads once. Order, times, comparison and file are those of `card bench`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import options
from rich.console import Console
from transformers.utils import logging as transformers_logging

from card import LLM, SamplingParams
from card.assembly.plan import readable
from card.config import ResolvedParams
from card.models.facts import context_limit, parameter_count
from card.models.inflation import price_in_words
from card.models.loaded_model import LoadedModel
from card.models.loading import load_tokenizer
from card.tools.bench.compare import TextJudge
from card.tools.bench.environment import MEASURED_START, Environment, weights_fingerprint
from card.tools.bench.lineup import BenchPlan
from card.tools.bench.records import ModelPair, RowFacts, Run
from card.tools.bench.runner import run_bench
from card.tools.bench.tables import rich_tables

BASELINE = "vanilla"
WARM_UP_TOKENS = 32  # long enough that the shapes of all passes are recorded on a GPU
_MAX_MODEL_LEN = 4096
_INTERRUPTED = 130


class LoadedPair:
    """Target and draft model, and what rows made of them have in common."""

    def __init__(self, args: argparse.Namespace, name: str, target: LoadedModel, draft: LoadedModel) -> None:
        self._args, self._name = args, name
        self._stack = contextlib.ExitStack()
        self._target, self._draft = target, draft
        self.tokenizer = load_tokenizer(args.target)
        self.dtype = str(target.dtype).removeprefix("torch.")
        self.max_model_len = min(context_limit(target), _MAX_MODEL_LEN)
        self.judge = TextJudge(target, greedy(args.max_tokens))

    def close(self) -> None:
        """End what the rows started."""
        self._stack.close()

    def pair_facts(self) -> ModelPair:
        """Return what the run says of the pair."""
        draft_price = price_in_words(self._draft)
        return ModelPair(
            name=self._name,
            target=self._args.target,
            draft=f"{self._args.draft}, {draft_price}" if draft_price else self._args.draft,
            target_cost=price_in_words(self._target),
            target_parameters=parameter_count(self._target),
            draft_parameters=parameter_count(self._draft),
            fingerprint=weights_fingerprint(self._target, self._draft),
        )

    def make_llm(self, draft: LoadedModel | str | None, **settings: Any) -> LLM:
        """Return an LLM on the target, closed with the pair."""
        start = readable(MEASURED_START, settings.get("method", "card"))
        return self._stack.enter_context(LLM(self._target, draft, tokenizer=self.tokenizer, **start, **settings))


def greedy(max_tokens: int) -> ResolvedParams:
    """Return how everything is decoded."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens).resolved()


def measure(
    args: argparse.Namespace,
    pairs: Mapping[str, Callable[[Callable[[str], None]], LoadedPair]],
    rows: Sequence[RowFacts],
    environment: Environment,
    console: Console,
) -> Run:
    """Measure all rows on each pair; return the run."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    plan = BenchPlan(
        rows=tuple(rows),
        baseline=BASELINE,
        pairs=pairs,
        datasets=(options.prompt_set(args.prompts, args.limit),),
        params=greedy(args.max_tokens),
        repeats=args.repeats,
    )
    return run_bench(plan, environment, args.out, console)


def shown(run: Run) -> int:
    """Print the tables of a run. Returns: 0, or 130 if it was interrupted."""
    for table in rich_tables(run):
        Console().print(table)
    return 0 if run.status == "complete" else _INTERRUPTED
