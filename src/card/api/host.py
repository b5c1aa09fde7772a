"""One pair of models, loaded, with its engine; and prompts made into requests.

`LLM` and `AsyncLLM` are shells over a `Host`; they differ in who drives the engine. How the engine is put together is
decided in `card.assembly`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from card.api.prompts import Prompt, PromptReader
from card.api.target import Target, load_target
from card.api.text_stream import TextStream
from card.assembly.build import Models, build, make_writers
from card.assembly.drafters import DraftSource, make_drafter, tell_ahead
from card.assembly.gifts import choose_verifier, feature_consumers, feature_wish
from card.assembly.latencies import MeasuredLatencies, check_once
from card.assembly.plan import Facts, Plan, resolve
from card.config import ResolvedParams, SamplingParams
from card.drafting.local.protocol import LocalWriter
from card.engine.request import CheckedRequest, Request, Update
from card.engine.scoring import Scorer
from card.engine.watchers import Watchers
from card.errors import SettingsError, TargetError, in_words
from card.links.child import DrafterChild
from card.links.leases import Leases
from card.links.link import DrafterLink
from card.machine.container import num_usable_cores
from card.machine.memory import free_memory, give_back_memory
from card.machine.threads import CoreSet, pinned, usable_cores
from card.models.facts import context_limit, end_token_ids, sampling_defaults
from card.models.features import FeatureConsumer, Rows
from card.models.images import ImagePrompt
from card.models.inflation import price_in_words
from card.models.names import model_name
from card.models.own.reasons import could_run_int8, is_exact
from card.models.parallel_draft import wants_states
from card.models.rows.pool import sequence_bytes
from card.models.runners import make_runner
from card.text.following import Threads
from card.text.grammar import GrammarCompiler
from card.tree.verify import MATCH, Verifier

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """The gain of a request in one round, with its text."""

    text: str
    update: Update
    is_failure: bool = False  # the text cannot be written: the request is to be ended


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request for the engine, and the text that will come of it."""

    checked: CheckedRequest
    text: TextStream

    @property
    def request(self) -> Request:
        """The request."""
        return self.checked.request

    def written(self, update: Update) -> Written:
        """Return the text that an update made certain. One that cannot be written ends this request alone."""
        try:
            text = self.text.take(update.token_ids, is_end=update.finish_reason is not None)
        except Exception as error:
            logger.error("the text of a request cannot be written: %s", in_words(error), exc_info=error)
            failure = TargetError(f"the text of this request cannot be written: {in_words(error)}")
            return Written("", Update(update.request_id, (), "error", update.stats, failure), is_failure=True)
        return Written(text, update)


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
        leases: Leases | None = None,
        verifier: Verifier = MATCH,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Load the models and bring the drafter up; arguments as of `LLM`.

        Args:
            spare: a process for the drafter that was started ahead of need.
            leases: of a pool of draft servers, which is never waited for; stays the caller's to close.
            say: is told what goes on, in words for a user who waits.
        Raises: SettingsError, ModelError, VocabularyError, WorkerError.
        """
        asked = {**settings, "target": _name(target), "draft": None if draft is None else _name(draft)}
        facts = Facts(
            has_draft=draft is not None,
            has_pool=leases is not None,
            is_draft_loaded=draft is not None and not isinstance(draft, str),
            wants_states=draft is not None and wants_states(draft),
            cores=usable_cores(),
            num_cores=num_usable_cores(),
            verifier=verifier,
        )
        plan = resolve(asked, facts, method=method)  # refuses what contradicts itself before anything is loaded
        self.method, self.settings = plan.method, plan.settings
        chosen, named = choose_verifier(self.settings, verifier)
        facts = replace(facts, verifier=chosen, verifier_named=named)
        resolve(asked, facts, method=method)  # a verifier with nothing to judge is refused as early
        if spare is not None and plan.has_drafter_process and isinstance(draft, str):
            tell_ahead(spare, self.settings)
        say(f"loading {self.settings.target}")
        with pinned(CoreSet((), min(torch.get_num_threads(), num_usable_cores()))):  # torch takes all cores there are
            loaded = load_target(target, draft, plan, tokenizer)
        facts = replace(facts, context_limit=context_limit(loaded.model), in_integers=is_exact(loaded.model))
        plan = resolve(asked, facts, method=method)
        self._take_target(loaded, plan, target)
        give_back_memory()  # before the first pass brings the weights into memory
        say("measuring what passes cost here")
        # Whether the target misses the cores of a drafter beside it is measured before there is one.
        without_misses = resolve(asked, replace(facts, spare_cores=num_usable_cores() - 1), method=method)
        self.latencies = MeasuredLatencies(
            without_misses, self.runner, is_target_named=isinstance(target, str), is_draft_named=isinstance(draft, str)
        )
        if without_misses.placements != plan.placements:
            facts = replace(facts, spare_cores=self.latencies.spare_cores(without_misses))
            plan = resolve(asked, facts, method=method)
        writers = self._make_writers(plan)
        self.link, shown = self._make_drafter(plan, draft, spare, leases)
        if self.link is not None and self.latencies.waits_for_drafter:  # while it loads it takes a core
            say("waiting for the drafter")
            self.link.start()
        give_back_memory()  # what loading a drafter here has left
        # Before the passes are warmed up: they decide what is kept.
        watchers = self._make_watchers(plan, draft if isinstance(draft, str) else "", writers, shown)
        with pinned(self.latencies.with_useful_threads(plan.cores).alone):
            self.runner.warm_up(1 + plan.draft.budget if plan.placements or plan.writers else 1)
        facts = replace(
            facts,
            latencies=self.latencies,
            row_bytes=self.runner.row_bytes,
            state_bytes=sequence_bytes(self.runner, 0),
            free_bytes=_free_bytes(self.runner.device),
        )
        self._build(resolve(asked, facts, method=method), watchers, writers)
        _warn_if_short(self.max_kv_bytes, facts.free_bytes)
        if self.link is not None:
            self.link.begin()  # not earlier: what is measured beside a drafter that loads is not kept
        self.latencies.watch_rounds()

    def _take_target(self, loaded: Target, plan: Plan, named: str | LoadedModel) -> None:
        """Make the runner, and read what the model and its tokenizer say about texts."""
        model, self.tokenizer = loaded.model, loaded.tokenizer
        self.target_cost, self.could_run_int8 = price_in_words(model), could_run_int8(model)
        self.end_ids = end_token_ids(model, self.tokenizer)
        self.sampling_defaults = sampling_defaults(model) if self.settings.generation_config == "auto" else {}
        self.runner = make_runner(model, max_model_len=plan.max_model_len, max_tree_rows=plan.target_tree_rows)
        self._prompts = PromptReader.for_target(self.tokenizer, self.settings, named, self.runner, model.dtype)
        check_once(self.runner, self.settings, is_named=isinstance(named, str))
        limit_s = self.settings.grammar_timeout_s
        self._lanes = Threads(limit_s)
        self.grammars = GrammarCompiler(self.tokenizer, self.runner.vocab_size, tuple(self.end_ids), limit_s=limit_s)

    def _build(self, plan: Plan, watchers: Watchers | None, writers: Mapping[str, LocalWriter]) -> None:
        """Make the engine of the last plan."""
        self.plan = plan
        models = Models(
            target=self.runner,
            link=self.link,
            latencies=self.latencies,
            watchers=watchers,
            writers=writers,
            lanes=self._lanes,
        )
        self._parts = build(plan, models)
        self.engine, self.policy, self.draft_settings = self._parts.engine, self._parts.policy, plan.draft
        if (agreement := self.latencies.agreement) is not None:
            self.policy.recall(agreement)
        self.max_model_len, self.max_kv_bytes = plan.max_model_len, plan.max_kv_bytes or 0
        pool, chunk = self._parts.worker.pool, self.settings.prefill_chunk
        self.scorer = Scorer(self.runner, pool, lambda: self.policy.cores, chunk=chunk)

    def close(self) -> None:
        """End the drafter and the processes that try grammars. May be called twice."""
        self.grammars.close()
        self.latencies.mend(self.policy.measured())
        self.latencies.remember_agreement(self.policy.agreement)
        if self.link is not None:
            self.latencies.remember_drafter()
            self._finalizer()
        self._parts.close()
        self._lanes.close()

    def make_request(self, prompt: Prompt, params: SamplingParams, request_id: int) -> PreparedRequest:
        """Return the request for a prompt: text, token ids, or a conversation for the model's chat template.

        Raises: PromptError for a prompt that is empty or does not fit; SettingsError for parameters that this model
        cannot follow.
        """
        if not isinstance(params, SamplingParams):
            raise SettingsError(f"the parameters of a prompt must be card.SamplingParams, got {params!r:.80}")
        unknown = max(params.logit_bias, default=0)
        if unknown >= self.runner.vocab_size:
            raise SettingsError(
                f"logit_bias has token {unknown}, but the target has tokens 0 to {self.runner.vocab_size - 1}; use ids "
                "of its tokenizer"
            )
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        prompt_ids = self.encode(prompt)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            images=prompt_ids.images if isinstance(prompt_ids, ImagePrompt) else None,
            params=self.resolved(params, len(prompt_ids)),
            is_bounded=self.bound_of(params) is not None,
            draft=self.draft_settings,
            end_ids=end_ids,
            uses_drafter=self.link is not None,
            grammar=self.grammars.compile(params.grammar) if params.grammar is not None else None,
        )
        checked = self.engine.check(request)
        text = TextStream(self.tokenizer, params.stop, params.min_tokens, params.shown_token_ids, after=prompt_ids)
        watched = replace(request, stop_check=text, end_ids=end_ids | text.end_ids) if params.stop else request
        return PreparedRequest(replace(checked, request=watched), text)

    def resolved(self, params: SamplingParams, num_prompt_tokens: int) -> ResolvedParams:
        """Return the parameters of a request with nothing left open: what it says, else the model, else greedy.

        Without a bound of its own, or of the model's, an answer may fill the context.
        """
        return params.resolved(self.sampling_defaults, room=max(1, self.max_model_len - num_prompt_tokens))

    def bound_of(self, params: SamplingParams) -> int | None:
        """Return the most new tokens that a request or the model's generation config states; None: the context's."""
        return params.max_tokens or self.sampling_defaults.get("max_tokens")

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises: PromptError if it is none."""
        return self._prompts.encode(prompt)

    def _make_writers(self, plan: Plan) -> Mapping[str, LocalWriter]:
        writers = make_writers(plan, self.runner.vocab_size, self.tokenizer)
        for writer in writers.values():
            writer.attach(self.runner)
        return writers

    def _make_watchers(
        self, plan: Plan, draft: str, writers: Mapping[str, LocalWriter], shown: Sequence[FeatureConsumer]
    ) -> Watchers | None:
        """Return those who look at the target's features, if there are any.

        Args:
            draft: as of `feature_wish`.
            shown: those who show them to the drafter.
        """
        consumers = [*feature_consumers(plan, self.runner), *shown]
        wish = feature_wish(plan.verifier, self.runner, draft)
        wanted = {writer.wanted_features for writer in writers.values()} - {None}
        if not (consumers or wish or wanted):
            return None
        rows: Rows | None = "all" if "all" in wanted else "logits" if wanted else None
        return Watchers(self.runner.features, consumers, wish, for_writers=rows)

    def _make_drafter(
        self, plan: Plan, draft: str | LoadedModel | None, spare: DrafterChild | None, leases: Leases | None
    ) -> tuple[DrafterLink | None, Sequence[FeatureConsumer]]:
        """Return the link to the drafter, if there is one, and what shows it the target's features."""
        if spare is not None and not plan.has_drafter_process:
            spare.close()
        if not plan.placements:
            return None, ()
        source = DraftSource(
            model=draft,
            vocab_size=self.runner.vocab_size,
            tokenizer=self.tokenizer,
            find_grammar=self.grammars.find,
            spare=spare,
            measures=not self.latencies.knows_drafter,
            leases=leases,
            target=self.runner,
        )
        drafter = make_drafter(plan, source)
        self.latencies.ask(drafter)
        self._finalizer = weakref.finalize(self, drafter.link.close)
        return drafter.link, drafter.consumers


def _name(model: str | LoadedModel) -> str:
    return model if isinstance(model, str) else model_name(model)


def _warn_if_short(kv_bytes: int, free_bytes: int) -> None:
    """Say that one long text may need more memory than there is: that ends the process, not the text."""
    if kv_bytes > free_bytes:
        logger.warning(
            "KV may take %.0f MiB, but %.0f MiB are free; lower max_model_len or kv_cache_memory, or give more memory",
            kv_bytes / 2**20,
            free_bytes / 2**20,
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()
