"""The start of an engine: load the target, measure it, build the engine.

Each step takes the result of the one before, so the order is fixed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from card.api.arguments import LLMArguments
from card.api.own_draft import Choice, choose_draft
from card.api.prompts import PromptReader
from card.api.target import Target, load_target
from card.assembly.build import Models, Parts, build, closed_if_it_fails, make_writers
from card.assembly.drafters import Drafter, DraftSource, make_drafter, tell_ahead
from card.assembly.latencies import MeasuredLatencies, check_once
from card.assembly.plan import Facts, Plan, room_tokens
from card.assembly.plugins import choose_verifier, feature_consumers, feature_wish
from card.assembly.prefixes import prefix_cache
from card.drafting.local.protocol import LocalWriter
from card.engine.watchers import Watchers
from card.errors import ModelError, SettingsError
from card.errors import named as setting_named
from card.kernels.compiler_process import CompilerProcess
from card.machine.container import num_usable_cores
from card.machine.memory import free_memory, give_back_memory
from card.machine.threads import CoreSet, default_threads, pinned, usable_cores
from card.models.block_loading import StateDrafter, load_state_drafter, needs_states
from card.models.by_transformers import torch_module
from card.models.drafter_facts import pass_bytes
from card.models.facts import about_row_bytes, context_limit, end_token_ids, sampling_defaults
from card.models.features import FeatureConsumer
from card.models.inflation import price_in_words
from card.models.own.decoder_model import DecoderModel
from card.models.own.reasons import could_run_int8, has_same_bits, is_exact
from card.models.protocol import sequence_bytes
from card.models.rows.prefix_cache import PrefixCache
from card.models.runner import RowRunner
from card.models.runners import make_runner
from card.text.following import Threads
from card.text.grammar import GrammarCompiler
from card.text.parts.formats import AUTO
from card.text.parts.view import check_format_name
from card.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target before its first pass, with the facts that it and its tokenizer give about texts."""

    choice: Choice
    state_drafter: StateDrafter | None  # the block or head that drafts, if one does
    facts: Facts
    plan: Plan
    runner: RowRunner
    tokenizer: Tokenizer
    prompts: PromptReader
    prefixes: PrefixCache | None
    grammars: GrammarCompiler
    lanes: Threads  # where the masks of grammars are computed
    end_ids: frozenset[int]
    sampling_defaults: Mapping[str, Any]
    target_cost: str | None
    could_run_int8: bool
    has_same_bits: bool  # candidates beside a token do not change what follows it
    pass_bytes: int  # of the target's weights that a pass reads


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs of a target's passes without a drafter beside it, and what follows from them."""

    facts: Facts
    plan: Plan
    latencies: MeasuredLatencies


def load(asked: LLMArguments) -> Loaded:
    """Refuse contradictory settings, then load the target. Raises: SettingsError, ModelError, VocabularyError."""
    check_format_name(str(asked.settings.get("answer_format", AUTO)))
    choice = choose_draft(asked, _first_facts(asked))
    asked, facts = choice.asked, _first_facts(choice.asked)
    facts = replace(facts, wants_states=facts.wants_states or choice.state_drafter is not None)
    plan = asked.plan(facts)
    verifier, named = choose_verifier(plan.settings, asked.verifier)
    facts = replace(facts, verifier=verifier, verifier_named=named)
    plan = asked.plan(facts)  # refuses a judge without candidates to judge
    if asked.spare is not None and plan.has_drafter_process and asked.draft_name is not None:
        tell_ahead(asked.spare, plan.settings)
    asked.say(f"loading {plan.settings.target}")
    with CompilerProcess() as compiler:
        with pinned(CoreSet((), min(default_threads(), num_usable_cores()))):  # torch takes all cores there are
            is_made_for_it = choice.state_drafter is not None
            target = load_target(
                asked.target, asked.draft, plan, compiler, asked.tokenizer, is_made_for_it=is_made_for_it
            )
        facts = replace(facts, context_limit=context_limit(target.model), in_integers=is_exact(target.model))
        facts = replace(facts, room_tokens=_room_tokens(target, asked.plan(facts)))
        loaded = _read(target, choice, facts)
    give_back_memory()  # before the first pass brings the weights into memory
    return loaded


def _first_facts(asked: LLMArguments) -> Facts:
    """Return what is known before anything is loaded."""
    draft = asked.draft
    return Facts(
        has_draft=draft is not None,
        has_pool=asked.leases is not None,
        is_draft_loaded=draft is not None and asked.draft_name is None,
        wants_states=needs_states(draft),
        cores=usable_cores(),
        num_cores=num_usable_cores(),
        verifier=asked.verifier,
    )


def _room_tokens(target: Target, plan: Plan) -> int:
    """Return the tokens of a text that memory has room for, once the weights are there."""
    free_bytes = _free_bytes(plan.settings.device)
    return room_tokens(plan, row_bytes=about_row_bytes(target.model), state_bytes=0, free_bytes=free_bytes)


def _read(target: Target, choice: Choice, facts: Facts) -> Loaded:
    """Make the runner, and read the facts that model and tokenizer give about texts."""
    asked = choice.asked
    plan = asked.plan(facts)
    model, tokenizer, settings = target.model, target.tokenizer, plan.settings
    target_cost, end_ids, has_int8 = price_in_words(model), end_token_ids(model, tokenizer), could_run_int8(model)
    num_read = pass_bytes(model)
    stated = sampling_defaults(model) if settings.generation_config == "auto" else {}
    sizes = {"max_model_len": plan.max_model_len, "max_tree_rows": plan.target_tree_rows}
    runner = make_runner(model, **sizes, cuda_graphs=settings.cuda_graphs)
    prompts = PromptReader.for_target(tokenizer, settings, asked.target, runner, model.dtype)
    if settings.prefix_cache is not None:
        asked.say("comparing the weights with those of kept rows")
    prefixes = prefix_cache(settings, runner, is_named=isinstance(asked.target, str))
    check_once(runner, settings, is_named=isinstance(asked.target, str))
    state_drafter: StateDrafter | None = None
    if plan.placements and choice.state_drafter is not None:
        if settings.draft_device not in (None, "cpu"):
            raise SettingsError(
                f"a block or head drafts in its target's own pass on a CPU: leave {setting_named('draft_device')} out"
            )
        try:
            dtype, folder = settings.dtype_of_draft, settings.weights_dir
            head = model.lm_head.weight if isinstance(model, DecoderModel) else None
            name = choice.state_drafter
            state_drafter = load_state_drafter(name, runner, dtype=dtype, cache_dir=folder, head=head)
        except ModelError as error:
            choice = choice.without_block(error)
            facts = replace(facts, has_draft=False, wants_states=False)
            plan = choice.asked.plan(facts)
    choice.tell()
    limit_s = settings.grammar_timeout_s
    return Loaded(
        choice=choice,
        state_drafter=state_drafter,
        facts=facts,
        plan=plan,
        runner=runner,
        tokenizer=tokenizer,
        prompts=prompts,
        prefixes=prefixes,
        grammars=GrammarCompiler(tokenizer, runner.vocab_size, tuple(end_ids), limit_s=limit_s),
        lanes=Threads(limit_s),
        end_ids=end_ids,
        sampling_defaults=stated,
        target_cost=target_cost,
        could_run_int8=has_int8,
        has_same_bits=has_same_bits(model),
        pass_bytes=num_read,
    )


def measure(loaded: Loaded) -> Measured:
    """Measure what no earlier start measured: which threads are useful, and how the target slows down without cores."""
    asked = loaded.choice.asked
    asked.say("measuring the cost of passes here")
    facts, plan, runner = loaded.facts, loaded.plan, loaded.runner
    names = {"is_target_named": isinstance(asked.target, str), "is_draft_named": asked.draft_name is not None}
    without_misses = asked.plan(replace(facts, spare_cores=num_usable_cores() - 1))
    latencies = MeasuredLatencies(without_misses, runner, **names)
    if without_misses.placements != plan.placements:
        facts = replace(facts, spare_cores=latencies.spare_cores(without_misses))
        plan = asked.plan(facts)
    return Measured(facts, plan, latencies)


def build_engine(loaded: Loaded, measured: Measured) -> Parts:
    """Start the drafter and build the engine. Raises: SettingsError, ModelError, WorkerError."""
    writers = make_writers(measured.plan, loaded.runner.vocab_size, loaded.tokenizer)
    with closed_if_it_fails(writers):
        for writer in writers.values():
            writer.attach(loaded.runner)
        return _with_drafter(loaded, measured, writers)


def _with_drafter(loaded: Loaded, measured: Measured, writers: Mapping[str, LocalWriter]) -> Parts:
    """Start the drafter, if there is one, and build the engine; a drafter is closed if that fails."""
    asked, plan, runner, latencies = loaded.choice.asked, measured.plan, loaded.runner, measured.latencies
    drafter = _drafter_of(loaded, measured)
    link, shown = (None, ()) if drafter is None else (drafter.link, drafter.consumers)
    try:
        if link is not None and latencies.waits_for_drafter:  # it takes a core while it loads
            asked.say("waiting for the drafter")
            link.start()
        give_back_memory()  # memory left over from loading a drafter here
        watchers = _watchers_of(asked, plan, runner, writers, shown)
        models = Models(
            target=runner,
            link=link,
            latencies=latencies,
            watchers=watchers,
            writers=writers,
            prefixes=loaded.prefixes,
            lanes=loaded.lanes,
        )
        parts = _built(asked, measured, runner, models)
        if link is not None:
            link.begin()  # not earlier: measurements beside a loading drafter are not kept
    except BaseException:
        if link is not None:
            link.close()
        raise
    return parts


def _drafter_of(loaded: Loaded, measured: Measured) -> Drafter | None:
    asked = loaded.choice.asked
    plan, spare = measured.plan, asked.spare
    if spare is not None and not plan.has_drafter_process:
        spare.close()
    if not plan.placements:
        return None
    source = DraftSource(
        model=loaded.state_drafter or asked.draft,
        vocab_size=loaded.runner.vocab_size,
        tokenizer=loaded.tokenizer,
        find_grammar=loaded.grammars.find,
        spare=spare,
        measures=not measured.latencies.knows_drafter,
        leases=asked.leases,
        target=loaded.runner,
        target_bytes=loaded.pass_bytes,
    )
    drafter = make_drafter(plan, source)
    measured.latencies.ask(drafter)
    return drafter


def _watchers_of(
    asked: LLMArguments,
    plan: Plan,
    runner: RowRunner,
    writers: Mapping[str, LocalWriter],
    shown: Sequence[FeatureConsumer],
) -> Watchers | None:
    """Return the consumers of the target's features, if any; ``shown`` passes features on to the drafter."""
    consumers = [*feature_consumers(plan, runner), *shown]
    wish = feature_wish(plan.verifier, runner, asked.draft_name or "")
    reads = any(writer.reads_states for writer in writers.values())
    return Watchers(runner.features, consumers, wish, for_writers=reads) if consumers or wish or reads else None


def _built(asked: LLMArguments, measured: Measured, runner: RowRunner, models: Models) -> Parts:
    """Warm up the passes, whose rows depend on the models around the target, and build the engine of the final plan."""
    plan, latencies = measured.plan, measured.latencies
    with pinned(latencies.with_useful_threads(plan.cores).alone):
        runner.warm_up(1 + plan.draft.budget if plan.placements or plan.writers or plan.foresees else 1)
    facts = replace(
        measured.facts,
        latencies=latencies,
        row_bytes=runner.row_bytes,
        state_bytes=sequence_bytes(runner, 0),
        free_bytes=_free_bytes(str(runner.device)),
    )
    parts = build(asked.plan(facts), models)
    if (agreement := latencies.agreement) is not None:
        parts.policy.recall(agreement)
    _warn_if_short(parts.plan.max_kv_bytes or 0, facts.free_bytes)
    return parts


def _warn_if_short(kv_bytes: int, free_bytes: int) -> None:
    """Warn if one long text may need more memory than is free: that would end the process, not the text."""
    if kv_bytes > free_bytes:
        logger.warning(
            "KV may take %.0f MiB, but %.0f MiB are free; lower max_model_len or kv_cache_memory, or give more memory",
            kv_bytes / 2**20,
            free_bytes / 2**20,
        )


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch_module("transformers.devices", f"device {device}").free_bytes(device))
    return free_memory()
