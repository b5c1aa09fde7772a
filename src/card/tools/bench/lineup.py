"""The rows of a run: which method runs on which cores, with which settings, and the models behind them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from card.api.llm import LLM
from card.assembly.drafters import as_it_drafts, load_state_draft
from card.assembly.plan import DEFAULT_MODEL_LEN, readable
from card.config import INT8, DraftSettings, ResolvedParams, parse_parameter_count
from card.config.registry import find_method
from card.errors import MissingError, SettingsError, named
from card.family.judges.knobs import parse_judge
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import dtype_name
from card.machine.importing import needs_torch
from card.machine.threads import pinned
from card.models.block_loading import is_state_drafter
from card.models.by_transformers import has_transformers, torch_module
from card.models.drafter_facts import drafter_of
from card.models.facts import context_limit, end_token_ids, parameter_count
from card.models.inflation import inflate, price_in_words
from card.models.loading import load_decoder, load_tokenizer
from card.models.names import OWN_BLOCK
from card.models.own.decoder_model import is_int8
from card.models.own.reasons import could_run_int8, is_exact
from card.tools.bench.compare import TextJudge
from card.tools.bench.datasets import Dataset
from card.tools.bench.environment import MEASURED_START, weights_fingerprint
from card.tools.bench.forced import ForcedAcceptance
from card.tools.bench.records import ModelPair, RowFacts
from card.tools.bench.row_names import (
    ALL_CORES,
    BASELINE,
    DRAFT_OPTIONS,
    THEIRS,
    UNCOUPLED,
    Spec,
    needed_files,
    needed_head,
    needs_draft,
    settings_read,
    spec_of,
)
from card.tools.bench.rows import CardRow, Decoded, PromptIds, Row, core_set
from card.tools.bench.summary import decode_rate

_WARM_UP_TOKENS = 16
_THEIR_ROWS = "card.tools.bench.transformers_rows"
_CHOOSING_PROMPTS = 2  # draft lengths are chosen on the first prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """A target, perhaps a draft model, and the price of the target, as the user asked for them."""

    target: str
    draft: str | None
    target_cost: str | None = None  # inflate it to the price of a model of this size, such as 90M; None: as it is

    @property
    def name(self) -> str:
        """A short name."""
        models = "+".join(Path(one).name for one in (self.target, self.draft) if one is not None)
        return f"{models}@{self.target_cost}" if self.target_cost else models


@dataclass(frozen=True, slots=True, kw_only=True)
class LineupSettings:
    """Settings that all rows have in common."""

    params: ResolvedParams
    cores: tuple[int, ...]  # the last one is the drafter's; "all cores" are all of them
    dtype: str = "auto"
    lengths: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10, 12)  # candidates of rows that take the fastest draft length
    max_model_len: int | None = None  # most tokens of a prompt and its answer; None: the model's limit, at most 4096
    own: Mapping[str, Any] = field(default_factory=dict)  # settings that one method alone reads
    draft_vocab: int | None = None  # draft models propose the first this many tokens alone; None: as usual
    draft: Mapping[str, Any] = field(default_factory=dict)  # the given ones of `DRAFT_OPTIONS`
    forced_acceptance: float | None = None  # see `ForcedAcceptance`; None: the target decides

    def cores_of(self, name: str) -> tuple[int, ...]:
        """Return the cores on which a row's target may decode."""
        is_tuned = name not in THEIRS and spec_of(name).is_tuned
        return self.cores if is_tuned or ALL_CORES in name else self.cores[:-1]

    @property
    def _rounds_as_theirs(self) -> bool:
        """True if texts of transformers may be compared with ours: activations have no more bits than weights."""
        return self.dtype == "float32" or (self.dtype != INT8 and why_not_int8() is not None)

    def engine_of(self, name: str) -> dict[str, Any]:
        """Return the settings of a row's engine that all rows share."""
        has_draft = self.draft_vocab is not None and needs_draft(name)
        return {"draft_vocab": self.draft_vocab} if has_draft else {}

    def is_forced(self, spec: Spec) -> bool:
        """Return whether forced acceptance applies to a row: it has candidates and no judge."""
        has_candidates = spec.drafter != "none" or spec.is_tuned
        return self.forced_acceptance is not None and has_candidates and "judge" not in spec.engine

    def facts_of(self, name: str) -> RowFacts:
        """Return the facts of a row, before any model is loaded."""
        cores = self.cores_of(name)
        if name in THEIRS:
            return RowFacts(
                name=name,
                method=name.removesuffix(ALL_CORES),
                cores=cores,
                threads=len(cores),
                is_exact=True,
                # It draws its own random numbers, and rounds in other places than our passes.
                is_comparable=self.params.temperature == 0.0 and self._rounds_as_theirs,
                settings={"lengths": list(self.lengths)} if needs_draft(name) else {},
            )
        spec = spec_of(name)
        settings = {"drafter": spec.drafter, "policy": "auto" if spec.is_tuned else "fixed", **spec.engine}
        settings |= {"lengths": self.lengths} if spec.has_lengths else {}
        settings |= {"force_acceptance": self.forced_acceptance} if self.is_forced(spec) else {}
        settings |= {**self.engine_of(name), **(self.draft if spec.takes_options else {}), **spec.draft}
        return RowFacts(
            name=name,
            method=spec.method,
            cores=self.cores if spec.drafter == "beside" else cores,
            threads=None if spec.is_tuned else len(cores),
            is_exact=not self.is_forced(spec)
            and find_method(spec.method).is_exact
            and ("judge" not in spec.engine or parse_judge(spec.engine["judge"]).is_exact),
            is_comparable=True,
            settings={key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Everything that a run measures."""

    rows: tuple[RowFacts, ...]
    baseline: str
    pairs: Mapping[str, Callable[[Callable[[str], None]], Lineup]]  # by name; the argument shows a line
    datasets: tuple[Dataset, ...]  # with all their prompts
    params: ResolvedParams
    repeats: int = 5
    limit: int | None = None  # prompts of each data set
    skips_long: bool = False  # leave out prompts that do not fit, instead of refusing them
    options: Mapping[str, Any] = field(default_factory=dict)  # of the command, for resuming the run

    def __post_init__(self) -> None:
        if self.repeats < 1 or (self.limit is not None and self.limit < 1):
            raise SettingsError(
                f"{named('repeats')} and {named('limit')} must be 1 or more, got {self.repeats} and {self.limit}"
            )
        if self.params.max_tokens < 2:
            raise SettingsError(f"{named('max_tokens')} must be 2 or more, got {self.params.max_tokens}")


def make_plan(
    names: Sequence[str], pairs: Sequence[PairSpec], settings: LineupSettings, datasets: Sequence[Dataset], **how: Any
) -> BenchPlan:
    """Return the plan of a run of these rows and pairs.

    Args:
        how: further fields of `BenchPlan`.
    Raises: SettingsError for pairs of one name, or rows that a pair cannot run; MissingError for rows that PyTorch runs
        where it is not installed.
    """
    opened: dict[str, Callable[[Callable[[str], None]], Lineup]] = {}
    for pair in pairs:
        if pair.name in opened:
            raise SettingsError(f"two pairs are named {pair.name}; name different models or prices")
        if pair.draft is None and (needing := [name for name in names if needs_draft(name)]):
            raise SettingsError(f"row {needing[0]} needs a draft model, and pair {pair.name} has none: give --draft")
        for name in names if _block_of(pair) is not None else ():
            if needs_draft(name) and (name in THEIRS or spec_of(name).drafter == "beside"):
                raise SettingsError(
                    f"row {name} runs without the target's states, which {pair.draft} reads; leave the row out"
                )
        for name in names:
            if name in THEIRS and not has_transformers():
                raise MissingError(needs_torch(f"row {name}"))
            head = needed_head(name)
            if head is not None and settings.own.get(head) is None:
                raise SettingsError(f"row {name} needs a head of card train {head}: give --{head} FILE")
            if lacking := [one for one in needed_files(name) if settings.own.get(one) is None]:
                raise SettingsError(f"row {name} needs a file: give {named(lacking[0])}")
        opened[pair.name] = partial(Lineup, names, pair, settings)
    rows = tuple(settings.facts_of(name) for name in names)
    return BenchPlan(
        rows=rows, baseline=BASELINE, pairs=opened, datasets=tuple(datasets), params=settings.params, **how
    )


def _block_of(pair: PairSpec) -> str | None:
    """Return the model in whose files the block or head of a pair lies; None if its draft model stands alone.

    Raises: SettingsError for a block or head of an inflated target.
    """
    if pair.draft is None or not (pair.draft == OWN_BLOCK or is_state_drafter(pair.draft, cache_dir=None)):
        return None
    if pair.target_cost is not None:
        raise SettingsError(f"{named('target_cost')} does not go with a block or a head: leave one of the two out")
    return pair.target if pair.draft == OWN_BLOCK else pair.draft


class Lineup:
    """The models of one pair, loaded once, and the rows made of them."""

    def __init__(
        self, names: Sequence[str], pair: PairSpec, settings: LineupSettings, say: Callable[[str], None]
    ) -> None:
        """Load the models.

        Args:
            say: called with a line about what is being prepared.
        Raises: CardError.
        """
        self._names, self._pair, self._settings, self._say = names, pair, settings, say
        self._stack = contextlib.ExitStack()
        self._llms: dict[str, LLM] = {}
        self.tokenizer = load_tokenizer(pair.target)
        self._block = _block_of(pair)  # with it rows load both models by their names
        is_apart = pair.draft is not None and self._block is None
        self._draft = load_decoder(str(pair.draft), dtype=settings.dtype) if is_apart else None
        self._target = load_decoder(pair.target, dtype=settings.dtype)
        if pair.target_cost:
            self._target = inflate(self._target, parse_parameter_count(pair.target_cost))
        self.could_run_int8 = could_run_int8(self._target)
        self.dtype = INT8 if is_int8(self._target) else dtype_name(self._target.dtype)
        self.judge = TextJudge(self._target, settings.params, rounds=not is_exact(self._target))
        self.end_ids = end_token_ids(self._target, self.tokenizer)
        most = settings.max_model_len or DEFAULT_MODEL_LEN
        self.max_model_len = min(context_limit(self._target), most)  # tokens of a prompt and its answer

    def close(self) -> None:
        """End the drafters and let the models go."""
        self._stack.close()
        self._llms.clear()
        gc.collect()

    def pair_facts(self) -> ModelPair:
        """Return the facts of the pair."""
        draft = self._draft
        if self._block is not None:
            runner = self._llm(BASELINE, spec_of(BASELINE), {}).host.runner
            draft = load_state_draft(self._block, self._target, runner, dtype=self._settings.dtype)
        read = None
        if draft is not None:
            part = as_it_drafts(draft, self._target, self.tokenizer, self._settings.draft_vocab)
            read = drafter_of(part, is_own=self._pair.draft == OWN_BLOCK)
        return ModelPair(
            name=self._pair.name,
            target=self._pair.target,
            draft=self._pair.draft,
            target_cost=price_in_words(self._target),
            target_parameters=parameter_count(self._target),
            draft_parameters=None if draft is None else parameter_count(draft),
            draft_bytes=None if read is None else read.step_bytes,
            fingerprint=weights_fingerprint(self._target, draft),
        )

    def make_rows(self, prompts: PromptIds, chosen: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """Return the rows, each warmed up; a draft length is chosen on the first prompts, by speed.

        Args:
            chosen: settings by row from an earlier part of the same run; their draft lengths are kept.
        """
        rows: dict[str, Row] = {}
        for name in self._names:
            self._say(f"preparing {name}")
            twin = rows.get(name.removesuffix(UNCOUPLED))  # whose draft length an uncoupled row takes
            known = chosen.get(name) or (twin.settings if twin else {})
            options = self._options(name, known)
            for option in options:
                option.decode(prompts[0], self._settings.params.replace(max_tokens=_WARM_UP_TOKENS))
            rows[name] = fastest(options, prompts[:_CHOOSING_PROMPTS], self._settings.params)
            if name in chosen:  # keep how it was chosen
                rows[name].settings = {**rows[name].settings, **chosen[name]}
        return list(rows.values())

    def _options(self, name: str, known: Mapping[str, Any]) -> Sequence[Row]:
        """Return the row of this name, or one for each draft length to choose from."""
        if name in THEIRS:
            return self._transformers_rows(name, known)
        spec, cores = spec_of(name), self._settings.cores_of(name)
        llm = self._llm(name, spec, known)
        if spec.is_tuned or spec.is_as_shipped:
            return [CardRow(name, llm, cores, None)]
        settings = {**spec.draft, "coupled_noise": not name.endswith(UNCOUPLED)}
        if spec.takes_options:
            settings = {**self._settings.draft, **settings}
        if not spec.has_lengths:
            return [CardRow(name, llm, cores, DraftSettings(**settings))]
        lengths = [known["num_speculative_tokens"]] if known else self._settings.lengths
        return [CardRow(name, llm, cores, DraftSettings(num_speculative_tokens=n, **settings)) for n in lengths]

    def _llm(self, name: str, spec: Spec, known: Mapping[str, Any]) -> LLM:
        """Return the LLM of a row, started once; rows that differ in draft settings alone share one."""
        cores = self._settings.cores_of(name)
        key = f"{spec.method} {spec.drafter} {spec.engine} {cores}"
        if key not in self._llms:
            common: dict[str, Any] = {"dtype": self._settings.dtype, **MEASURED_START}
            common["max_model_len"] = self.max_model_len
            chosen = self._settings.engine_of(name)
            chosen |= {one: value for one, value in self._settings.own.items() if one in settings_read(name)}
            settings = readable({**common, **self._policy(spec, cores, known), **spec.engine, **chosen}, spec.method)
            if self._settings.is_forced(spec):
                assert self._settings.forced_acceptance is not None
                coins = ForcedAcceptance(self._settings.forced_acceptance, self._settings.params.seed or 0)
                settings |= {"verifier": coins, "allows_inexact": True}
            draft: Any = {"none": None, "turns": self._pair.draft if self._draft is None else self._draft}.get(
                spec.drafter, self._pair.draft
            )
            target = self._target if self._block is None or draft is None else self._pair.target
            with pinned(core_set(self._settings.cores, None)):  # a tuned row chooses its cores among these
                llm = LLM(target, draft, tokenizer=self.tokenizer, method=spec.method, **settings)
            self._llms[key] = self._stack.enter_context(llm)
        return self._llms[key]

    def _policy(self, spec: Spec, cores: tuple[int, ...], known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that place a row; none for a tuned one."""
        if spec.is_tuned:
            return {}
        settings: dict[str, Any] = {"policy": "fixed", "cores": cores, "threads": len(cores)}
        if spec.drafter == "turns":  # in the target's thread, so it may be the object that transformers uses
            settings |= {"placement": "inline"}
        if spec.drafter == "beside":
            settings |= {"placement": "process", "draft_cores": self._settings.cores[-1:]}
        if spec.has_lengths:
            settings["num_speculative_tokens"] = max(self._settings.lengths)
        if spec.is_as_shipped and "num_speculative_tokens" in known:  # measured when the run began
            settings["num_speculative_tokens"] = known["num_speculative_tokens"]
        if spec.takes_options:
            largest = DraftSettings(**self._settings.draft)
            settings |= {name: getattr(largest, name) for name in DRAFT_OPTIONS}
        return settings

    def _transformers_rows(self, name: str, known: Mapping[str, Any]) -> list[Row]:
        modules_of = torch_module("transformers.modules", f"row {name}").modules_of
        rows = import_module(_THEIR_ROWS)  # with torch, which all other rows do without
        cores, assistant, lengths = self._settings.cores_of(name), None, list[int | None]([None])
        if needs_draft(name):
            assistant, lengths = (
                (modules_of(self._draft) if self._draft is not None else None),
                [None, *self._settings.lengths],
            )
        return [
            rows.TransformersRow(
                name, modules_of(self._target), self.end_ids, cores, assistant=assistant, num_assistant_tokens=n
            )
            for n in lengths
            if not known or assistant is None or rows.assistant_title(n) == known["assistant"]
        ]


def fastest(options: Sequence[Row], prompts: PromptIds, params: ResolvedParams) -> Row:
    """Return the option that decodes the prompts fastest; prompts are the outer loop."""
    if len(options) == 1:
        return options[0]
    runs: list[list[Decoded]] = [[] for _ in options]
    for prompt_ids in prompts:
        for option, done in zip(options, runs, strict=True):
            done.append(option.decode(prompt_ids, params))
    rates = [decode_rate(done) for done in runs]
    best = options[rates.index(max(rates))]
    varying = "num_speculative_tokens" if "num_speculative_tokens" in best.settings else "assistant"
    tried = {str(option.settings[varying]): round(rate, 2) for option, rate in zip(options, rates, strict=True)}
    best.settings = {**best.settings, "chosen_among": tried}  # tokens/s of each on those prompts
    return best
