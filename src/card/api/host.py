"""Everything behind one pair of models: loading, the drafter, the engine, and prompts made into requests.

`LLM` and `AsyncLLM` are shells over a `Host`; they differ in who drives the engine.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from card.api.text_stream import TextStream
from card.config import INT8, DraftSettings, EngineSettings, SamplingParams, parse_size, split_settings
from card.engine.engine import Engine, Limits
from card.engine.latency_store import LatencyKey, LatencyStore, drafter_key
from card.engine.links import Drafter, DrafterPlan, Where, make_drafter, reported_cost
from card.engine.measuring import Measuring
from card.engine.placing import choose_where, make_policy, round_length, share_out
from card.engine.scoring import Scorer
from card.errors import PromptError, SettingsError
from card.methods import Method, find_method
from card.models.cuda.bucketed import make_runner
from card.models.draft_vocab import check_draft_vocab
from card.models.fingerprint import tokenizer_fingerprint
from card.models.grammar import GrammarCompiler
from card.models.hrad.foresight import OFF, Foresight, foresight
from card.models.inflation import inflate, inflated_from, parse_parameter_count
from card.models.loading import (
    check_pair,
    computes_bfloat16,
    context_limit,
    end_token_ids,
    load_decoder,
    load_model,
    load_tokenizer,
    parameter_count,
)
from card.models.places import cache_folder
from card.models.text import encode_chat, encode_prompt
from card.policy.cores import CoreSet, pinned, plan_cores
from card.policy.cost import PassCost, ScheduleCost
from card.policy.rounds import Policy
from card.transport.child import DrafterChild
from card.transport.link import DrafterLink
from card.workers.request import Request
from card.workers.target import OpenWriter, TargetWorker
from card.workers.trace import Trace
from card.writers.local import find_writer
from card.writers.local.protocol import LocalWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from card.models.decoder_model import LoadedModel

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_DEFAULT_MAX_MODEL_LEN = 4096
_SPARE_ROWS = 64
_FIRST_DRAFT_SHARE = 0.1  # of the target's pass that a drafter's takes, while nothing is known of it
_RAM_SHARE = 0.25  # of the free memory, that KV may take if nothing is said


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request for the engine, and the text that will come of it."""

    request: Request
    text: TextStream


class Host:
    """The models, the drafter and the engine of one `LLM`; makes requests, runs none."""

    def __init__(
        self,
        target: str | LoadedModel,
        draft: str | LoadedModel | None,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        method: str | None,
        settings: Mapping[str, Any],
        spare: DrafterChild | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Load the models and bring the drafter up; arguments as of `LLM`.

        Args:
            spare: a process for the drafter that was started ahead of need.
            say: is told what goes on, in words for a user who waits.
        Raises: SettingsError, ModelError, VocabularyError, WorkerError.
        """
        engine_changes, draft_changes = split_settings(settings)
        has_drafter = draft is not None or engine_changes.get("draft_address") is not None
        self.method: Method = find_method(method or ("card" if has_drafter else "vanilla"))
        drafts, writer_names = share_out(self.method, engine_changes.get("writers"))
        self.settings = EngineSettings(
            target=_name(target),
            draft=None if draft is None else _name(draft),
            method=self.method.name,
            **engine_changes,
        )
        self.draft_settings = self.method.shape(DraftSettings(**draft_changes))
        self._refuse_contradictions(draft, drafts=drafts, has_drafter=has_drafter)
        say(f"loading {self.settings.target}")
        self.tokenizer = tokenizer or load_tokenizer(self.settings.target, cache_dir=self.settings.weights_dir)
        check_draft_vocab(self.settings.draft_vocab, self.tokenizer)
        model = self._load_target(target, draft if drafts else None)
        self.max_model_len = self._context(model)
        self._end_ids = end_token_ids(model, self.tokenizer)
        self.generation_config = model.generation_config
        self.runner = make_runner(
            model, max_model_len=self.max_model_len, max_tree_rows=self.draft_settings.budget + _SPARE_ROWS
        )
        self._grammars = GrammarCompiler(self.tokenizer, self.runner.vocab_size, tuple(self._end_ids))
        self._where = self._choose_where(draft) if drafts else None
        self._is_target_named, self._is_draft_named = isinstance(target, str), isinstance(draft, str)
        has_own_core, in_integers = self._where in ("process", "switch"), self.runner.precision == INT8
        self.cores = plan_cores(self.settings, own_drafter_core=has_own_core, in_integers=in_integers)
        self._store = LatencyStore(cache_folder(self.settings.cache_dir) if self.settings.cache else None)
        self._waits = self._waits_for_drafter()
        self.measuring = self._make_measuring()
        self.measuring.doubt(self.cores)
        self.link: DrafterLink | None = None
        if spare is not None and self._where not in ("process", "switch"):
            spare.close()
        plan = self._drafter_plan(draft, spare)
        drafter = self._make_drafter(plan)
        if self.link is not None and self._waits:  # before anything is measured: while it loads it takes a core
            say("waiting for the drafter")
            self.link.start()
        say("measuring what passes cost here")
        most_tokens = 1 + self.draft_settings.budget if drafts or writer_names else 1
        if self.settings.threads is None and self.runner.device.type == "cpu":
            self.cores = self.measuring.useful(self.cores)
            plan = replace(plan, cores=self.cores) if plan is not None else None
        foresee = self._foresight()  # before the passes are warmed up: it decides what they keep
        with pinned(self.cores.alone):
            self.runner.warm_up(most_tokens)
        pinned_names = frozenset(draft_changes)
        self.policy: Policy = self._make_policy(drafter, plan, pinned_names, has_writers=bool(writer_names))
        if drafter is not None and plan is not None and "num_speculative_tokens" not in pinned_names:
            self._adapt_length(drafter, plan, draft_changes)
        self._writers = self._make_writers(writer_names)
        self.max_kv_bytes = self._kv_bytes()
        self.engine, self.scorer = self._make_engine(foresee)

    def _make_engine(self, foresee: Foresight | None) -> tuple[Engine, Scorer]:
        worker = TargetWorker(
            self.runner,
            clock=time.perf_counter,
            max_kv_bytes=self.max_kv_bytes,
            writers=self._openers(),
            top_k=max((writer.top_k for writer in self._writers.values()), default=0),
            foresee=foresee,
        )
        limits = Limits(max_num_seqs=self.settings.max_num_seqs, prefill_chunk=self.settings.prefill_chunk)
        engine = Engine(worker, self.link, self.method, limits=limits, policy=self.policy)
        scorer = Scorer(self.runner, worker.pool, lambda: self.policy.cores, chunk=self.settings.prefill_chunk)
        return engine, scorer

    def close(self) -> None:
        """End the drafter. May be called twice."""
        if self.link is not None:
            self._remember_drafter(self.link)
            self._finalizer()
        for writer in self._writers.values():
            writer.close()

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: int,
    ) -> PreparedRequest:
        """Return the request for a prompt: text, token ids, or a conversation for the model's chat template.

        A seed is drawn if there is none. Raises: PromptError for a prompt that is empty or does not fit; SettingsError
        for parameters that this model cannot follow.
        """
        unknown = max(params.logit_bias, default=0)
        if unknown >= self.runner.vocab_size:
            raise SettingsError(
                f"logit_bias has token {unknown}, but the target has tokens 0 to {self.runner.vocab_size - 1}; use ids "
                "of its tokenizer"
            )
        if params.seed is None:
            params = params.replace(seed=secrets.randbelow(2**31))
        text = TextStream(self.tokenizer, params.stop, params.min_tokens, params.shown_token_ids)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        request = Request(
            request_id=request_id,
            prompt_ids=self.encode(prompt),
            params=params,
            draft=self.draft_settings,
            end_ids=end_ids,
            stop_check=text if params.stop else None,
            uses_drafter=self.link is not None,
            grammar=self._grammars.compile(params.grammar) if params.grammar is not None else None,
        )
        self.engine.check(request)
        return PreparedRequest(request, text)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises: PromptError if it is none."""
        if isinstance(prompt, str):
            return tuple(encode_prompt(self.tokenizer, prompt))
        given: Sequence[object] = prompt if isinstance(prompt, Sequence) else (None,)
        if given and isinstance(given[0], Mapping):
            return tuple(encode_chat(self.tokenizer, given))  # type: ignore[arg-type]
        token_ids = [int(token_id) for token_id in given if isinstance(token_id, Integral)]  # NumPy's are Integral too
        if len(token_ids) < len(given):
            raise PromptError(
                f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}; put several of them, "
                "or one that is token ids, into a list"
            )
        return tuple(token_ids)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record what the engine does inside the block."""
        trace = self.engine.trace = Trace(shares_clock=self._where != "remote")
        try:
            yield trace
        finally:
            self.engine.trace = None

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _refuse_contradictions(self, draft: str | LoadedModel | None, *, drafts: bool, has_drafter: bool) -> None:
        settings = self.settings
        if drafts and not has_drafter:
            raise SettingsError(f"method {self.method.name} needs a draft model; give one, or use method vanilla")
        if settings.draft_vocab is not None and not drafts:
            raise SettingsError("draft_vocab is about a draft model: give draft, and a method and writers that use it")
        if draft is not None and not isinstance(draft, str) and settings.placement == "process":
            raise SettingsError(
                "a loaded draft model cannot move into another process; give its folder, or placement thread"
            )
        if settings.schedule != "auto":
            where = settings.placement or ("remote" if settings.draft_address else None)
            if not self.method.is_tuned or not drafts:
                raise SettingsError(f"schedule is for method card; {self.method.name} has its own, so leave it out")
            if where is not None and (settings.schedule == "turns") != (where == "inline"):
                raise SettingsError(
                    f"schedule {settings.schedule} does not go with a drafter that is {where}: turns are taken with a "
                    "drafter inline, and only that one takes turns; leave one of the two out"
                )
        if settings.draft_keys is not None and settings.draft_address is None:
            raise SettingsError("draft_keys are for a draft server: give its draft_address too")

    def _choose_where(self, draft: str | LoadedModel | None) -> Where:
        settings = self.settings
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        has_cores = num_cores is None or num_cores > settings.draft_threads
        is_loaded = draft is not None and not isinstance(draft, str)
        return choose_where(self.method, settings, is_loaded=is_loaded, has_cores=has_cores)

    def _load_target(self, target: str | LoadedModel, draft: str | LoadedModel | None) -> LoadedModel:
        model: LoadedModel
        settings, kept_in = self.settings, self.settings.weights_dir
        where: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "cache_dir": kept_in}
        if not isinstance(target, str):
            model = target
        elif self.settings.target_cost is not None:
            model = load_model(target, **where)  # to be inflated
        else:
            model = load_decoder(target, **where)
        if self.method.needs_draft and draft is not None:
            check_pair(self.tokenizer, model, draft, cache_dir=kept_in)
        if self.settings.target_cost is not None:
            model = inflate(cast("PreTrainedModel", model), parse_parameter_count(self.settings.target_cost))
        is_bfloat16 = model.dtype == torch.bfloat16 and self.settings.dtype != INT8
        if self.method.name != "vanilla" and is_bfloat16 and not computes_bfloat16(model.device):
            _advise_float32()
        original = inflated_from(model)
        self.target_cost: str | None = None
        if original is not None:
            self.target_cost = (
                f"{parameter_count(model) / 1e6:.0f}M (inflated from {original / 1e6:.1f}M, same outputs)"
            )
        return model

    def _context(self, model: LoadedModel) -> int:
        limit = context_limit(model)
        wanted = self.settings.max_model_len or min(_DEFAULT_MAX_MODEL_LEN, limit)
        if wanted > limit:
            raise SettingsError(f"max_model_len must be at most {limit}, the target's own limit, got {wanted}")
        return wanted

    def _kv_bytes(self) -> int:
        """Return the most memory for the target's KV. Raises: SettingsError if one longest request does not fit."""
        row_bytes, max_rows = self.runner.row_bytes, self.runner.max_rows
        if self.settings.kv_cache_memory is None:
            wanted = self.settings.max_num_seqs * max_rows * row_bytes
            return max(min(wanted, int(_RAM_SHARE * _free_bytes(self.runner.device))), max_rows * row_bytes)
        given = parse_size(self.settings.kv_cache_memory)
        if given < max_rows * row_bytes:
            raise SettingsError(
                f"kv_cache_memory {self.settings.kv_cache_memory} holds {given // row_bytes} rows of KV, but a request "
                f"of max_model_len {self.max_model_len} with its candidates needs {max_rows} "
                f"({max_rows * row_bytes / 2**20:.0f}M); raise it, or lower max_model_len"
            )
        return given

    def _make_policy(
        self, drafter: Drafter | None, plan: DrafterPlan | None, pinned_names: frozenset[str], *, has_writers: bool
    ) -> Policy:
        """Return the policy: what was set, and for a tuned method the rest by measurement."""
        where = None if plan is None else plan.where
        core_set = self.cores.beside if where in ("process", "switch") else self.cores.alone

        def costs() -> tuple[ScheduleCost, ScheduleCost]:
            alone = beside = self.measuring.cost(self.cores.alone)
            if drafter is None or plan is None:
                return ScheduleCost(core_set, alone), ScheduleCost(core_set, alone)
            if core_set != self.cores.alone:
                beside = self.measuring.cost(core_set)
            own, reported = self._own_cost(drafter, plan), self._drafter_cost(drafter, plan)
            drafting = reported or own or beside.scaled(_FIRST_DRAFT_SHARE)
            return ScheduleCost(self.cores.alone, alone, own), ScheduleCost(core_set, beside, drafting)

        return make_policy(
            self.method,
            self.settings,
            self.draft_settings,
            costs,
            where=where,
            pinned=pinned_names,
            has_writers=has_writers,
            cores=core_set,
        )

    def _make_writers(self, names: Sequence[str]) -> dict[str, LocalWriter]:
        """Return the local writers. Raises: SettingsError for settings that one of them cannot follow."""
        vocab_size, tokenizer = self.runner.vocab_size, tokenizer_fingerprint(self.tokenizer) if names else ""
        return {name: find_writer(name)(self.settings, vocab_size, tokenizer) for name in names}

    def _openers(self) -> dict[str, OpenWriter]:
        """Return how each writer besides the draft model begins a request."""

        def beginner(writer: LocalWriter) -> OpenWriter:
            return lambda request: writer.open(request.prompt_ids)

        return {name: beginner(writer) for name, writer in self._writers.items()}

    def _foresight(self) -> Foresight | None:
        """Return where to branch by a predictor of rejections, if the method uses one and one was asked for."""
        predictor = self.settings.hrad if self.method.uses_predictor else OFF
        return foresight(predictor, self.runner, self.draft_settings.branch_below)

    def _adapt_length(self, drafter: Drafter, plan: DrafterPlan, draft_changes: Mapping[str, Any]) -> None:
        """Let a method that is defined by rounds draft as much as fits into one of the target's passes."""
        cost = (drafter.reported() or drafter.measured(plan)) if self.method.length_from_latencies else None
        if cost is None:
            return
        draft, target = DraftSettings(**draft_changes), self.measuring.cost(self.policy.cores)
        length = round_length(self.method, draft, target=target, drafter=cost, most=self.max_model_len)
        self.draft_settings = self.method.shape(draft.replace(num_speculative_tokens=length))

    def _waits_for_drafter(self) -> bool:
        """Return whether the drafter must be up before the first token.

        Not under a tuned policy, which decodes plainly or in turns meanwhile. A drafter of which nothing is known is
        waited for even then, where it is the only one: the policy could not weigh it.
        """
        settings = self.settings
        if settings.wait_for_drafter is not None:
            return settings.wait_for_drafter
        if settings.draft_optional:
            return False
        if not self.method.is_tuned or settings.policy == "fixed" or self._where == "remote":
            return True
        return self._where == "process" and self._store.cost(self._drafter_key()) is None

    def _make_measuring(self) -> Measuring:
        settings, is_named = self.settings, self._is_target_named
        return Measuring(
            self.runner,
            self._store,
            settings.target if is_named else None,
            max_sequences=min(8, settings.max_num_seqs),
            is_quick=not self._waits,
            more=settings.target_cost or "",
        )

    def _drafter_key(self) -> LatencyKey | None:
        """Return what the latencies of a drafter in a process of its own are kept under; None if they are not."""
        settings = self.settings
        if settings.draft is None or self._where not in ("process", "switch") or not self._is_draft_named:
            return None
        return drafter_key("drafter", settings, CoreSet(self.cores.draft, settings.draft_threads))

    def _drafter_cost(self, drafter: Drafter, plan: DrafterPlan) -> PassCost | None:
        """Return what passes of a drafter elsewhere cost, as it says or as an earlier one did."""
        return drafter.reported() or (None if plan.where == "remote" else self._store.cost(self._drafter_key()))

    def _own_cost(self, drafter: Drafter, plan: DrafterPlan) -> PassCost | None:
        """Return what passes of a draft model in this process cost."""
        if drafter.runner is None:
            return None
        settings, key = self.settings, None
        if settings.draft is not None and self._is_draft_named:
            key = drafter_key("draft in turns", settings, self.cores.alone)
        return self.measuring.remembered(key, lambda: drafter.measured(plan, is_quick=not self._waits))

    def _remember_drafter(self, link: DrafterLink) -> None:
        """Keep what a drafter in a process of its own said that its passes cost."""
        cost = reported_cost(link)
        if cost is not None and self._where in ("process", "switch"):
            self._store.keep_cost(self._drafter_key(), cost, is_quick=False)

    def _make_drafter(self, plan: DrafterPlan | None) -> Drafter | None:
        """Return the drafter; one that is elsewhere loads while this process goes on."""
        if plan is None:
            return None
        drafter = make_drafter(plan)
        self.link = drafter.link
        self._finalizer = weakref.finalize(self, self.link.close)
        return drafter

    def _drafter_plan(self, draft: str | LoadedModel | None, spare: DrafterChild | None) -> DrafterPlan | None:
        if self._where is None:
            return None
        return DrafterPlan(
            model=draft,
            settings=self.settings,
            draft=self.draft_settings,
            where=self._where,
            cores=self.cores,
            max_model_len=self.max_model_len,
            vocab_size=self.runner.vocab_size,
            tokenizer=self.tokenizer,
            find_grammar=self._grammars.find,
            spare=spare,
            measures=self._store.cost(self._drafter_key()) is None,
        )


@functools.cache
def _advise_float32() -> None:
    """Say once that candidates may cost more than they save as things are."""
    logger.warning(
        "this CPU has no bfloat16 instructions, so that checking candidates in bfloat16 may cost more than it saves; "
        "dtype float32 (--dtype float32) may be faster, in twice the memory"
    )


def _name(model: str | LoadedModel) -> str:
    return model if isinstance(model, str) else str(model.config.name_or_path or type(model).__name__)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
