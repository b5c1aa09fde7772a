"""The rows of `methods.py`: which method runs on which cores, with which settings, and the models behind them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import environment
import report
from rich.console import Console
from rows import AssistantSettings, CardRow, Decoded, Row, TransformersRow

from card import LLM, SamplingParams
from card.config import DraftSettings
from card.engine.cores import Home, pinned
from card.errors import SettingsError
from card.methods import find_method
from card.models.demo import DEMO_NAMES
from card.models.hrad import DEMO_HRAD
from card.models.loading import end_token_ids, load_model, load_tokenizer

BASELINE, BASELINE_ALL_CORES = "vanilla", "vanilla-all-cores"
SEVERAL_WRITERS = "card-writers"
SINGLE_WRITERS = ("card", "suffix-all-cores", "recycling-all-cores")  # each of its writers alone
ALL_CORES, UNCOUPLED = "-all-cores", "-uncoupled"
_WARM_UP_TOKENS = 16
_CHOOSING_PROMPTS = 2  # draft lengths are chosen on the first prompts

Drafter = Literal["none", "turns", "beside", "own"]  # no model, in turns, on a core of its own, or the policy's choice
PromptIds = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One of our rows. What runs beside a drafter has the target's core, all else the cores that its name says."""

    method: str
    drafter: Drafter = "none"
    is_tuned: bool = False  # policy auto, and nothing set
    has_lengths: bool = False  # the draft length is the fastest of --sps-lengths
    is_as_shipped: bool = False  # drafts as the method says for the pair: lengths from latencies, if it has any
    takes_options: bool = False  # the draft settings that the command line gives
    draft: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def _tuned(method: str, drafter: Drafter = "none", **engine: Any) -> Spec:
    return Spec(method=method, drafter=drafter, is_tuned=True, engine=engine)


def _card(verify: str, **draft: Any) -> Spec:
    return Spec(method="card", drafter="beside", takes_options=True, draft={"verify": verify, **draft})


def _rounds(method: str) -> Spec:
    return Spec(method=method, drafter="beside", is_as_shipped=True)


_TURNS = Spec(method="card", drafter="turns", has_lengths=True, takes_options=True, draft={"verify": "tree"})
_SPS = Spec(method="sps", drafter="turns", has_lengths=True)

OURS: Mapping[str, Spec] = MappingProxyType(
    {
        BASELINE: Spec(method="vanilla"),
        BASELINE_ALL_CORES: Spec(method="vanilla"),
        "sps": _SPS,
        "sps-all-cores": _SPS,
        "ouroboros-all-cores": Spec(method="ouroboros", drafter="turns", has_lengths=True),
        "lookup-all-cores": _tuned("lookup"),
        "suffix-all-cores": _tuned("suffix"),
        "recycling-all-cores": _tuned("recycling"),
        "lookahead-all-cores": _tuned("lookahead"),
        "pearl": _rounds("pearl"),
        "ssd": _rounds("ssd"),
        "specbranch": _rounds("specbranch"),
        "card-chain": _card("chain"),
        "card-tree": _card("tree"),
        "card-best-first": _card("tree", growth="best-first"),
        "card-turns-all-cores": _TURNS,
        "card": _tuned("card", "own"),
        SEVERAL_WRITERS: _tuned("card", "own", writers=("beam", "suffix", "recycling")),
    }
)
THEIRS = (
    "transformers",
    "transformers-all-cores",
    "transformers-assisted",
    "transformers-assisted-all-cores",
)
COUPLED = ("sps", "card-chain", "card-tree")  # which --coupling-report runs without coupled noise, too
KNOWN = (*OURS, *THEIRS, *(name + UNCOUPLED for name in COUPLED))
PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "all": (*OURS, *THEIRS),
        "ours": tuple(OURS),
        "schedules": tuple(name for name, spec in OURS.items() if spec.method in ("vanilla", "sps", "card")),
        "rivals": tuple(
            name for name in OURS if name not in ("sps", "card-chain", "card-turns-all-cores")
        ),  # each method once, at its best
        "writers": (BASELINE, BASELINE_ALL_CORES, *SINGLE_WRITERS, SEVERAL_WRITERS),
        "transformers": THEIRS,
    }
)


def names_of(asked: Sequence[str]) -> list[str]:
    """Return the rows that names and presets mean, in our order, plain decoding always. Raises: SettingsError."""
    wanted = {BASELINE}
    for name in asked:
        if name not in KNOWN and name not in PRESETS:
            raise SettingsError(f"unknown method {name!r}; known: {', '.join((*PRESETS, *KNOWN))}")
        wanted.update(PRESETS.get(name, (name,)))
    return [name for name in KNOWN if name in wanted]


class Lineup:
    """The models, loaded once, and the rows made of them."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args = args
        self._console = console
        self._stack = contextlib.ExitStack()
        self._llms: dict[str, LLM] = {}
        self.cores = environment.choose_cores(args.cores)
        self.tokenizer = load_tokenizer(args.target)
        self.target = environment.load_target(args.target, args.dtype, args.target_cost)
        self.draft = load_model(args.draft, dtype=args.dtype)
        self.target_cost: str | None = None
        self.params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)

    def close(self) -> None:
        """End the drafters."""
        self._stack.close()

    def make_rows(self, names: Sequence[str], prompts: PromptIds) -> list[Row]:
        """Return the rows, each warmed up; where a draft length is to be chosen, the fastest on the first prompts."""
        rows: list[Row] = []
        chosen: dict[str, Row] = {}  # uncoupled rows take the draft length of their coupled twin
        for name in names:
            self._console.print(f"preparing {name}")
            options = self._options(name, chosen.get(name.removesuffix(UNCOUPLED)))
            for option in options:
                option.decode(prompts[0], self.params.replace(max_tokens=_WARM_UP_TOKENS))
            chosen[name] = fastest(options, prompts[:_CHOOSING_PROMPTS], self.params)
            rows.append(chosen[name])
        return rows

    def _options(self, name: str, twin: Row | None) -> Sequence[Row]:
        """Return the row of this name, or one for each draft length to choose from."""
        if name in THEIRS:
            return self._transformers_rows(name)
        spec = OURS[name.removesuffix(UNCOUPLED)]
        llm, cores = self._llm(name.removesuffix(UNCOUPLED), spec), self._cores(name, spec)
        if spec.is_tuned or spec.is_as_shipped:
            return [CardRow(name, llm, cores, None)]
        settings = {**spec.draft, "coupled_noise": not name.endswith(UNCOUPLED)}
        if spec.takes_options:
            settings = {**self._asked(), **settings}
        if not spec.has_lengths:
            return [CardRow(name, llm, cores, DraftSettings(**settings))]
        lengths = self._args.sps_lengths if twin is None else [twin.settings["num_speculative_tokens"]]
        return [CardRow(name, llm, cores, DraftSettings(num_speculative_tokens=n, **settings)) for n in lengths]

    def _cores(self, name: str, spec: Spec) -> tuple[int, ...]:
        """Return the cores on which a row of ours decodes, or may."""
        return self.cores if spec.is_tuned or name.endswith(ALL_CORES) else self.cores[:1]

    def _asked(self) -> dict[str, Any]:
        """Return the draft settings that were given on the command line."""
        asked = {name: getattr(self._args, name) for name in report.DRAFT_OPTIONS}
        return {name: value for name, value in asked.items() if value is not None}

    def _llm(self, name: str, spec: Spec) -> LLM:
        """Return the LLM of a row, brought up once; rows that differ in draft settings alone share one."""
        cores = self._cores(name, spec)
        key = f"{spec.method} {spec.drafter} {spec.engine} {cores}"
        if key not in self._llms:
            common: dict[str, Any] = {"dtype": self._args.dtype, "start_timeout_s": environment.START_TIMEOUT_S}
            settings = {**common, **self._policy(spec, cores), **spec.engine}
            draft: Any = {"none": None, "turns": self.draft}.get(spec.drafter, self._args.draft)
            with pinned(Home(self.cores)):  # who chooses cores by itself has these
                llm = LLM(self.target, draft, tokenizer=self.tokenizer, method=spec.method, **settings)
            self._llms[key] = self._stack.enter_context(llm)
            self.target_cost = llm.target_cost
        return self._llms[key]

    def _policy(self, spec: Spec, cores: tuple[int, ...]) -> dict[str, Any]:
        """Return the settings that place a row; none for one that tunes itself."""
        if spec.is_tuned:
            return {}
        settings: dict[str, Any] = {"policy": "fixed", "cores": cores, "threads": len(cores)}
        if spec.drafter == "turns":  # in the target's thread, so it may be the very object that transformers uses
            settings |= {"placement": "inline"}
        if spec.drafter == "beside":
            settings |= {"placement": "process", "draft_cores": self.cores[1:]}
        if spec.has_lengths:
            settings["num_speculative_tokens"] = max(self._args.sps_lengths)
        if spec.takes_options:
            largest = DraftSettings(**self._asked())
            settings |= {name: getattr(largest, name) for name in report.DRAFT_OPTIONS}
        if find_method(spec.method).uses_predictor:
            settings["hrad"] = self._hrad()
        return settings

    def _hrad(self) -> str:
        """Return the predictor as the library would choose it, which here gets loaded models and no names."""
        is_demo = [DEMO_NAMES.get(name) for name in (self._args.target, self._args.draft)] == ["target", "draft"]
        if self._args.hrad == "auto":
            return DEMO_HRAD if is_demo else "off"
        return str(self._args.hrad)

    def _transformers_rows(self, name: str) -> list[Row]:
        options: list[AssistantSettings | None] = [None]
        if "assisted" in name:
            constant = [AssistantSettings(num_assistant_tokens=n) for n in self._args.sps_lengths]
            options = [AssistantSettings(), *constant]
        return [
            TransformersRow(
                name,
                self.target,
                end_token_ids(self.target, self.tokenizer),
                self.cores if name.endswith(ALL_CORES) else self.cores[:1],
                is_comparable=self.params.temperature == 0.0,
                assistant=self.draft if option else None,
                assistant_settings=option,
            )
            for option in options
        ]


def fastest(options: Sequence[Row], prompts: PromptIds, params: SamplingParams) -> Row:
    """Return the option that decodes the prompts fastest; prompts are the outer loop."""
    if len(options) == 1:
        return options[0]
    runs: list[list[Decoded]] = [[] for _ in options]
    for prompt_ids in prompts:
        for option, done in zip(options, runs, strict=True):
            done.append(option.decode(prompt_ids, params))
    rates = [report.tokens_per_s(done) for done in runs]
    best = options[rates.index(max(rates))]
    varying = "num_speculative_tokens" if "num_speculative_tokens" in best.settings else "assistant"
    tried = {str(option.settings[varying]): round(rate, 2) for option, rate in zip(options, rates, strict=True)}
    best.settings = {**best.settings, "chosen_among": tried}  # tokens/s of each on those prompts
    return best
