"""The drafter that the settings ask for, and what is known of its speed: whoever builds an engine begins here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedTokenizerBase

from card.config import DraftSettings, EngineSettings, SamplingParams
from card.models.cuda.bucketed import make_runner
from card.models.cuda.graphs import Lane
from card.models.draft_vocab import always_drafted, restrict_head
from card.models.fingerprint import tokenizer_fingerprint
from card.models.loading import context_limit, end_token_ids, load_decoder
from card.models.torch_runner import TorchRunner
from card.policy.cores import CorePlan, pinned
from card.policy.cost import PassCost
from card.policy.latency import measure_pass_cost
from card.transport.child import DrafterChild
from card.transport.drafter_process import DrafterConfig
from card.transport.inline import InlineLink
from card.transport.link import DrafterLink
from card.transport.process import ProcessLink
from card.transport.remote import RemoteLink
from card.transport.switch import SwitchLink
from card.transport.thread import ThreadLink
from card.workers.drafter import DrafterWorker
from card.workers.replica import draft_spec
from card.writers.cuda.device_beam import DeviceBeamWriter, make_writer
from card.writers.shaping import FindGrammar

if TYPE_CHECKING:
    from card.models.decoder_model import LoadedModel

Where = Literal["inline", "thread", "process", "remote", "switch"]

_SPARE_ROWS = 64
_MAX_TOKENS_PER_PASS = 256  # a longer text is read in several passes, so that others are not kept waiting
_MEASURING_S, _QUICK_S = 0.4, 0.1  # for a draft model in this process; while somebody waits


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlan:
    """What the drafter is made of."""

    model: str | LoadedModel | None  # None: the draft server has it
    settings: EngineSettings
    draft: DraftSettings
    where: Where
    cores: CorePlan
    max_model_len: int
    vocab_size: int  # of the target
    tokenizer: PreTrainedTokenizerBase  # the target's
    find_grammar: FindGrammar | None = None  # for a drafter in this process
    spare: DrafterChild | None = None  # a process that was started ahead of need
    measures: bool = True  # a drafter in a process of its own tells what its passes cost

    @property
    def max_tree_rows(self) -> int:
        """KV rows that the tree of one request may take."""
        return tree_rows(self.draft)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A link, and the draft model if it is in this process."""

    link: DrafterLink
    runner: TorchRunner | None = None
    lane: Lane | None = None  # where it computes

    def measured(self, plan: DrafterPlan, *, is_quick: bool = False) -> PassCost | None:
        """Return what passes of a draft model in this process cost; None if there is none here."""
        if self.runner is None or self.lane is None:
            return None
        limit_s = _QUICK_S if is_quick else _MEASURING_S
        with pinned(plan.cores.alone), self.lane.entered():
            return measure_pass_cost(self.runner, clock=time.perf_counter, time_limit_s=limit_s)

    def reported(self) -> PassCost | None:
        """Return what the started drafter elsewhere says its passes cost; None if it says nothing."""
        return reported_cost(self.link)


def reported_cost(link: DrafterLink) -> PassCost | None:
    """Return what the drafter behind a link says its passes cost; None if it is not up yet, or says nothing."""
    ready = link.ready
    passes = ready.passes if ready is not None else None
    if passes is None or len(passes.points) < 2:
        return None
    return PassCost(passes.points, passes.per_sequence_s, passes.per_context_row_s)


def tree_rows(draft: DraftSettings) -> int:
    """Return the KV rows that the tree of one request may take."""
    width = draft.beam_width
    if draft.growth == "fan-out":
        width = max(width, max(draft.fan_out) * (draft.num_speculative_tokens + 1))
    return min(2 * draft.lead * width, draft.max_nodes) + _SPARE_ROWS


def make_drafter(plan: DrafterPlan) -> Drafter:
    """Return the drafter that the plan asks for; what is elsewhere has begun to load.

    Raises: ModelError if a draft model in this process cannot be loaded.
    """
    if plan.where == "remote":
        return Drafter(_begun(_remote_link(plan)))
    if plan.where == "process":
        return Drafter(_begun(_process_link(plan)))
    beside = _begun(_process_link(plan)) if plan.where == "switch" else None
    try:
        return _make_here(plan, beside)
    except BaseException:
        if beside is not None:
            beside.close()
        raise


def _begun(link: DrafterLink) -> DrafterLink:
    link.begin()
    return link


def _make_here(plan: DrafterPlan, beside: DrafterLink | None) -> Drafter:
    """Return the drafter with its model in this process, besides the one in another process, if there is one."""
    model = _load(plan)
    lane = Lane(model.device)
    with pinned(plan.cores.alone), lane.entered():
        runner = _make_runner(plan, model)
        writer = make_writer(runner, takes_turns=plan.where != "thread", find_grammar=plan.find_grammar)
        if isinstance(writer, DeviceBeamWriter):
            spec = draft_spec(plan.draft, SamplingParams(temperature=0.0, seed=0), runner.max_model_len)
            writer.warm_up(spec, runner.max_model_len)
    worker = DrafterWorker(writer, clock=time.perf_counter, max_tokens_per_pass=_MAX_TOKENS_PER_PASS)
    if plan.where == "thread":
        return Drafter(ThreadLink(worker, lane), runner, lane)
    inline = InlineLink(worker)
    return Drafter(inline if beside is None else SwitchLink(beside, inline), runner, lane)


def _load(plan: DrafterPlan) -> LoadedModel:
    assert plan.model is not None
    settings, model = plan.settings, plan.model
    if isinstance(model, str):
        device = settings.draft_device or settings.device
        model = load_decoder(model, dtype=settings.dtype_of_draft, device=device, cache_dir=settings.weights_dir)
    if settings.draft_vocab is None:
        return model
    return restrict_head(model, settings.draft_vocab, {*always_drafted(plan.tokenizer), *end_token_ids(model)})


def _make_runner(plan: DrafterPlan, model: LoadedModel) -> TorchRunner:
    max_model_len = min(plan.max_model_len, context_limit(model))
    runner = make_runner(model, max_model_len=max_model_len, max_tree_rows=plan.max_tree_rows)
    runner.warm_up(plan.draft.beam_width)
    return runner


def _process_link(plan: DrafterPlan) -> ProcessLink:
    settings = plan.settings
    assert isinstance(plan.model, str)
    template = DrafterConfig(
        address="",
        incarnation=0,
        parent_pid=0,
        model=plan.model,
        dtype=settings.dtype_of_draft,
        device=settings.draft_device or settings.device,
        threads=settings.draft_threads,
        cores=plan.cores.draft,
        max_model_len=plan.max_model_len,
        max_tree_rows=plan.max_tree_rows,
        warm_up_tokens=plan.draft.beam_width,
        measures=plan.measures,
        cache_dir=settings.weights_dir,
        draft_vocab=settings.draft_vocab,
        always_drafted=() if settings.draft_vocab is None else always_drafted(plan.tokenizer),
    )
    return ProcessLink(
        template,
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.drafter_timeout_s,
        spare=plan.spare,
    )


def _remote_link(plan: DrafterPlan) -> RemoteLink:
    settings = plan.settings
    assert settings.draft_address is not None
    return RemoteLink(
        settings.draft_address,
        vocab_size=plan.vocab_size,
        tokenizer=tokenizer_fingerprint(plan.tokenizer),
        keys=Path(settings.draft_keys) if settings.draft_keys is not None else None,
        start_timeout_s=settings.start_timeout_s,
        silence_timeout_s=settings.drafter_timeout_s,
    )
