"""The drafter of a plan: its model, its worker and the link to it, wherever it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from card.assembly.latency.timing import measure_pass_cost
from card.assembly.plan import Plan
from card.config import EngineSettings, Placement, SamplingParams
from card.drafting.draft_shaping import FindGrammar
from card.drafting.draft_writers import make_writer
from card.drafting.drafter import MAX_REQUESTS, DrafterWorker
from card.drafting.messages import PassSeconds, Ready
from card.drafting.protocol import DraftWriter
from card.engine.replica import draft_spec
from card.errors import CardError
from card.links.child import DrafterChild
from card.links.in_process import InlineLink, ThreadLink
from card.links.leases import LeasedLink, Leases
from card.links.link import DrafterLink
from card.links.process import MEASURING_S, DrafterConfig, DraftModel, LikelyModel, ProcessLink
from card.links.remote import RemoteLink
from card.links.shown_states import ShownStates
from card.links.switch import SwitchLink
from card.machine.lane import Lane
from card.machine.memory import give_back_memory
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet, pinned, use_threads
from card.models.block_loading import load_state_drafter
from card.models.by_transformers import torch_module
from card.models.draft_vocab import always_drafted, drafted_ids, kept_ids, restrict_head, usual_ids
from card.models.drafter_facts import gains_by_trimming, pass_bytes
from card.models.facts import context_limit, end_token_ids, parameter_count
from card.models.features import FeatureConsumer
from card.models.loaded_model import LoadedModel
from card.models.loading import load_decoder, load_tokenizer
from card.models.own.decoder_model import DecoderModel
from card.models.own.draft_block import DraftBlock
from card.models.own.exact_decoder import prepare_code
from card.models.own.reasons import is_exact
from card.models.runner import RowRunner
from card.models.runners import make_runner, plain_runner
from card.text.fit import tokenizer_fingerprint
from card.text.grammar import BackgroundGrammars, GrammarCompiler
from card.text.tokenizer import Tokenizer

IN_TURNS_S = 0.1  # for measuring passes of a draft model in this process: short, since the start waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """The draft model as given, and the facts of the target that its drafter needs."""

    model: str | LoadedModel | None  # None: the draft server has it
    vocab_size: int  # of the target
    tokenizer: Tokenizer | None  # the target's; None: compare with a draft server's by size alone
    find_grammar: FindGrammar | None = None  # for a drafter in this process
    spare: DrafterChild | None = None  # a process that was started ahead of need
    kv_cache_bytes: int | None = None  # for the drafter; None: a few sequences of full length
    measures: bool = True  # a drafter in a process of its own reports the cost of its passes
    leases: Leases | None = None  # of a pool, which has the models
    integer_threads: int | None = None  # of integer passes in the target's thread; None: as many as that has
    target: RowRunner | None = None  # gives its hidden states to a drafter that reads them; None: there are none
    target_bytes: int | None = None  # of weights that its pass reads, see `gains_by_trimming`; None: they are not known


@dataclass(frozen=True, slots=True)
class Drafter:
    """A link, and the draft model if it is in this process."""

    link: DrafterLink
    runner: RowRunner | None = None
    lane: Lane | None = None  # where it computes
    consumers: Sequence[FeatureConsumer] = ()  # of the target's features, for the drafter

    def measured(self, cores: CoreSet) -> PassCost | None:
        """Return what passes of a draft model in this process cost; None if there is none here."""
        if self.runner is None or self.lane is None:
            return None
        with pinned(cores), self.lane.entered():
            return measure_pass_cost(self.runner, clock=time.perf_counter, time_limit_s=IN_TURNS_S)

    def reported(self) -> PassCost | None:
        """Return the cost of passes that a drafter elsewhere reports; None if it is not up yet, or reports none."""
        passes = self.link.ready.passes if self.link.ready is not None else None
        if passes is None or len(passes.points) < 2:
            return None
        return PassCost(passes.points, passes.per_sequence_s, passes.per_context_row_s)


def make_drafter(plan: Plan, source: DraftSource) -> Drafter:
    """Return the drafter that the plan asks for; one that is elsewhere begins when its link does.

    Raises: ModelError if a draft model in this process cannot be loaded.
    """
    placements = dict(plan.placements)
    outside: DrafterLink | None = None
    if placements.get("beside") in ("process", "remote"):
        outside = outside_link(plan, source)
        del placements["beside"]
    if outside is not None and not placements:
        return Drafter(outside)
    try:
        (placement,) = placements.values()
        here = _make_here(plan, source, placement)
    except BaseException:
        if outside is not None:
            outside.close()
        raise
    return here if outside is None else replace(here, link=SwitchLink(outside, here.link))


def outside_link(plan: Plan, source: DraftSource) -> DrafterLink:
    """Return the link to a drafter in a process of its own, or on a server; nothing is begun yet."""
    return _remote_link(plan, source) if "remote" in plan.placements.values() else _process_link(plan, source)


def link_here(
    placement: Placement,
    writer: DraftWriter,
    *,
    clock: Callable[[], float] = time.perf_counter,
    lane: Lane | None = None,
    integer_threads: int | None = None,
) -> InlineLink | ThreadLink:
    """Return the link to a drafter in this process, in a thread of its own or in the target's."""
    worker = make_worker(writer, clock=clock)
    return ThreadLink(worker, lane) if placement == "thread" else InlineLink(worker, integer_threads)


def make_worker(
    writer: DraftWriter,
    *,
    clock: Callable[[], float] = time.perf_counter,
    max_requests: int = MAX_REQUESTS,
    peers: Callable[[], Iterable[DrafterWorker]] = tuple,
) -> DrafterWorker:
    """Return the worker of one target that drafts with this writer; arguments as of `DrafterWorker`."""
    return DrafterWorker(writer, clock=clock, max_requests=max_requests, peers=peers)


def tell_ahead(child: DrafterChild, settings: EngineSettings) -> None:
    """Send a child the draft model that it will probably run, while the target is loaded."""
    assert settings.draft is not None
    device = settings.draft_device or settings.device
    likely = LikelyModel(
        name=settings.draft, dtype=settings.dtype_of_draft, device=device, cache_dir=settings.weights_dir
    )
    child.tell_ahead(msgspec.json.encode(likely))


def proposed_ids(
    model: str | LoadedModel | None, tokenizer: Tokenizer | None, num_tokens: int | None
) -> tuple[int, ...] | None:
    """Return the tokens that a draft model proposes; None for all.

    Args:
        tokenizer: of the target.
        num_tokens: that are asked for; None: those of a block's own file, all of a head with tokens of its own, or else
            `usual_ids`.
    """
    if num_tokens is not None:
        return drafted_ids(tokenizer, num_tokens)
    if isinstance(model, DraftBlock) and (known := kept_ids(model)) is not None:
        more = () if tokenizer is None else always_drafted(tokenizer)
        return tuple(sorted({*known.tolist(), *more}))
    has_own = isinstance(model, DecoderModel) and model.output_ids is not None
    return None if tokenizer is None or has_own else usual_ids(tokenizer)


def load_likely(likely: LikelyModel) -> LoadedModel | None:
    """Return the model; None if it cannot be loaded: if the settings do ask for it, its error is raised then.

    Its machine code is ready then, too, and serves a target of the same kind.
    """
    try:
        model = load_decoder(likely.name, dtype=likely.dtype, device=likely.device, cache_dir=likely.cache_dir)
        if isinstance(model, DecoderModel) and is_exact(model):
            prepare_code(model)
        give_back_memory()
        return model
    except (CardError, RuntimeError, MemoryError):  # out of memory is a RuntimeError in torch
        return None


def load_drafter(draft: DraftModel, *, threads: int, loaded: LoadedModel | None = None) -> tuple[DraftWriter, Ready]:
    """Load and warm up a model that no target's process holds; return its writer, and its `Ready` for targets.

    The passes of the calling thread then have ``threads`` threads.

    Args:
        loaded: the model, if it has been loaded.

    Raises: ModelError if it cannot be loaded; SettingsError if not one sequence fits into the memory.
    """
    use_threads(threads, in_integers=False)
    whole = loaded or _load(draft)
    use_threads(threads, in_integers=is_exact(whole))
    model = restricted(whole, draft.drafted_ids, draft.target_bytes)
    max_model_len = min(draft.max_model_len, context_limit(model))
    runner = plain_runner(model, max_model_len=max_model_len, max_tree_rows=draft.max_tree_rows)
    runner.warm_up(draft.warm_up_tokens)
    cost = None
    if draft.measuring_s:
        cost = measure_pass_cost(runner, clock=time.perf_counter, time_limit_s=draft.measuring_s)
    fingerprint: str | None = None
    if draft.has_unknown_target:
        fingerprint = tokenizer_fingerprint(load_tokenizer(draft.name, cache_dir=draft.cache_dir))

    def make_compiler() -> GrammarCompiler:
        tokenizer = load_tokenizer(draft.name, cache_dir=draft.cache_dir)
        return GrammarCompiler(tokenizer, runner.vocab_size, tuple(end_token_ids(model, tokenizer)), num_threads=1)

    find_grammar = BackgroundGrammars(make_compiler)
    writer = make_writer(runner, draft.kv_cache_bytes, takes_turns=False, find_grammar=find_grammar)
    return writer, Ready(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        num_parameters=parameter_count(whole),
        passes=PassSeconds(cost.points, cost.per_sequence_s, cost.per_context_row_s) if cost else None,
        tokenizer=fingerprint,
        layers_per_pass=writer.layers_per_pass,
    )


# ---- inside ----------------------------------------------------------------------------------------------------------


def _make_here(plan: Plan, source: DraftSource, placement: Placement) -> Drafter:
    """Return the drafter with its model in this process."""
    draft = _draft_model(plan, source)
    assert source.model is not None
    whole = _load(draft) if isinstance(source.model, str) else source.model
    model = restricted(whole, draft.drafted_ids, draft.target_bytes)
    graphs = plan.settings.cuda_graphs
    lane = _lane_on(model.device, graphs=graphs)
    with pinned(plan.cores.alone), lane.entered():
        max_model_len = min(plan.max_model_len, context_limit(model))
        runner = make_runner(model, max_model_len=max_model_len, max_tree_rows=plan.draft_tree_rows, cuda_graphs=graphs)
        runner.warm_up(plan.draft.beam_width)
        takes_turns = placement == "inline"
        writer = make_writer(
            runner,
            source.kv_cache_bytes,
            takes_turns=takes_turns,
            find_grammar=source.find_grammar,
            target=source.target,
        )
        spec = draft_spec(plan.draft, SamplingParams(temperature=0.0, seed=0).resolved(), runner.max_model_len)
        writer.warm_up(spec, runner.max_model_len)
    link = link_here(placement, writer, lane=lane, integer_threads=source.integer_threads)
    consumers = () if writer.wanted_states is None else (ShownStates(link, writer.wanted_states),)
    return Drafter(link, runner, lane, consumers)


def _lane_on(device: object, *, graphs: bool) -> Lane:
    """Return where a worker computes on a device: in a place of its own beside recorded passes, else as all do."""
    lane: Lane = torch_module("cuda.choosing", f"device {device}").make_lane(device) if graphs else Lane()
    return lane


def _load(draft: DraftModel) -> LoadedModel:
    return load_decoder(draft.name, dtype=draft.dtype, device=draft.device, cache_dir=draft.cache_dir)


def restricted(model: LoadedModel, ids: Iterable[int] | None, target_bytes: int | None = None) -> LoadedModel:
    """Return the model with only the part of its head that proposes these tokens, or ends texts; None is all.

    Args:
        target_bytes: of a pass of the target, if the part must gain something; None: it was asked for.
    """
    if ids is None:
        return model
    part = restrict_head(model, {*ids, *end_token_ids(model)})
    return part if target_bytes is None or gains_by_trimming(model, part, target_bytes) else model


def load_state_draft(name: str, target: LoadedModel, runner: RowRunner, *, dtype: str) -> LoadedModel:
    """Return a block or a head for a loaded target; ``name`` and errors as of `load_state_drafter`."""
    head = target.lm_head.weight if isinstance(target, DecoderModel) else None
    return load_state_drafter(name, runner, dtype=dtype, cache_dir=None, head=head)


def as_it_drafts(
    model: LoadedModel, target: LoadedModel, tokenizer: Tokenizer, num_tokens: int | None = None
) -> LoadedModel:
    """Return a draft model with the part of its head that drafts for a target; ``num_tokens`` as of `proposed_ids`."""
    ids = proposed_ids(model, tokenizer, num_tokens)
    return restricted(model, ids, pass_bytes(target) if num_tokens is None else None)


def _draft_model(plan: Plan, source: DraftSource) -> DraftModel:
    settings = plan.settings
    is_asked = settings.draft_vocab is not None
    has_ids = is_asked or source.target_bytes is not None
    return DraftModel(
        name=source.model if isinstance(source.model, str) else "",
        dtype=settings.dtype_of_draft,
        device=settings.draft_device or settings.device,
        max_model_len=plan.max_model_len,
        max_tree_rows=plan.draft_tree_rows,
        warm_up_tokens=plan.draft.beam_width,
        kv_cache_bytes=source.kv_cache_bytes,
        measuring_s=MEASURING_S if source.measures else 0.0,
        cache_dir=settings.weights_dir,
        drafted_ids=proposed_ids(source.model, source.tokenizer, settings.draft_vocab) if has_ids else None,
        target_bytes=None if is_asked else source.target_bytes,
    )


def _process_link(plan: Plan, source: DraftSource) -> ProcessLink:
    settings = plan.settings
    assert isinstance(source.model, str)
    return ProcessLink(
        DrafterConfig(threads=settings.draft_threads, cores=plan.cores.draft, model=_draft_model(plan, source)),
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.drafter_timeout_s,
        spare=source.spare,
    )


def _remote_link(plan: Plan, source: DraftSource) -> RemoteLink:
    settings = plan.settings
    common: dict[str, Any] = {
        "vocab_size": source.vocab_size,
        "tokenizer": tokenizer_fingerprint(source.tokenizer) if source.tokenizer is not None else "",
        "least_layers": 2 if plan.method.needs_parallel_draft else 1,
        "keys": Path(settings.draft_keys) if settings.draft_keys is not None else None,
        "start_timeout_s": settings.start_timeout_s,
        "silence_timeout_s": settings.drafter_timeout_s,
    }
    if source.leases is not None:
        return LeasedLink(source.leases, **common)
    return RemoteLink(settings.draft_address, **common)
