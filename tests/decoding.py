"""Runs requests on toy models with any method and link; shared by the exactness tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from card.config import DraftSettings, EngineSettings, SamplingParams
from card.config.registry import find_method
from card.config.selection import SelfDrafting, parse_selection
from card.drafting.beam import BeamWriter
from card.drafting.drafter import DrafterWorker
from card.drafting.local import find_writer
from card.engine.engine import Engine
from card.engine.metrics import RequestStats
from card.engine.queue import Limits
from card.engine.request import Request
from card.engine.target import TargetWorker
from card.links.in_process import InlineLink
from card.links.link import DrafterLink
from card.models.protocol import Extension, LanguageModel
from card.tree.masks import GrammarState
from tests.toy import TableModel
from tests.unreliable_link import FakeLink, Faults

PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=40)
LEAST_READ = 4  # KV rows that a target reads at least when it drafts for itself: fewer than the shortest text has
_FRESH_IDS = itertools.count(100)


def toy_target(seed: int = 0, **settings: int) -> TableModel:
    return TableModel(
        seed, vocab_size=12, order=2, spread=1.5, **{"max_model_len": 128, "num_tree_rows": 512, **settings}
    )


def unhurried(target: TableModel) -> TableModel:
    """Return a target whose passes from now on take a moment in which other threads run, as those of real models do."""
    run = target.forward

    def forward(extensions: Sequence[Extension]) -> list[Any]:
        time.sleep(0.001)
        return run(extensions)

    target.forward = forward  # type: ignore[method-assign]
    return target


def toy_draft(target: TableModel, agreement: float, seed: int = 1) -> TableModel:
    own = TableModel(
        seed, target.vocab_size, order=2, spread=1.5, max_model_len=target.max_model_len, num_tree_rows=512
    )
    return own.blend(target, agreement)


def drafter_for(draft: LanguageModel) -> DrafterWorker:
    return DrafterWorker(BeamWriter(draft), clock=time.perf_counter)


def decode(
    target: LanguageModel,
    link: DrafterLink | None,
    *,
    method: str = "card",
    params: SamplingParams = GREEDY,
    draft: DraftSettings | None = None,
    prompt: tuple[int, ...] = PROMPT,
    end_ids: frozenset[int] = frozenset(),
    request_id: int | None = None,
    writers: tuple[str, ...] = (),
    grammar: GrammarState | None = None,
    foresees: bool = False,
) -> tuple[list[int], str, RequestStats]:
    """Return the new tokens, the finish reason and the counters.

    A request whose id is not said gets one of its own, as a drafter that served another may still send layers for it.
    """
    engine = make_engine(target, link, method, writers=writers, foresees=foresees)
    request = make_request(
        next(_FRESH_IDS) if request_id is None else request_id,
        method=method,
        params=params,
        draft=draft,
        prompt=prompt,
        end_ids=end_ids,
        uses_drafter=link is not None,
        grammar=grammar,
    )
    engine.add(engine.check(request))
    token_ids: list[int] = []
    while engine.has_work:
        for update in engine.step():
            assert update.token_ids, "every update brings at least one token"
            assert update.error is None
            token_ids += update.token_ids
    assert update.finish_reason is not None
    return token_ids, update.finish_reason, update.stats


def make_engine(
    target: LanguageModel,
    link: DrafterLink | None,
    method: str = "card",
    *,
    writers: tuple[str, ...] = (),
    limits: Limits | None = None,
    foresees: bool = False,
) -> Engine:
    """Return an engine with the method's own writers and those named besides."""
    chosen = find_method(method)
    names = dict.fromkeys((*chosen.writers, *writers))
    local = {name: find_writer(name)(EngineSettings(), target.vocab_size) for name in names}
    openers = {name: (lambda request, writer=writer: writer.open(request.prompt_ids)) for name, writer in local.items()}
    top_k = max((writer.top_k for writer in local.values()), default=0)
    drafting = None
    if chosen.selection is not None:
        rule = parse_selection(chosen.selection)
        ends = {"num_first": min(1, rule.num_first), "num_last": min(1, rule.num_last)}
        rule = replace(rule, least=LEAST_READ, **ends)
        drafting = SelfDrafting(rule, chosen.num_looked_up)
    worker = TargetWorker(
        target, clock=time.perf_counter, writers=openers, top_k=top_k, self_drafting=drafting, foresees=foresees
    )
    return Engine(worker, link, limits=limits)


def make_request(
    request_id: int,
    *,
    method: str = "card",
    params: SamplingParams = GREEDY,
    draft: DraftSettings | None = None,
    prompt: tuple[int, ...] = PROMPT,
    end_ids: frozenset[int] = frozenset(),
    uses_drafter: bool = True,
    grammar: GrammarState | None = None,
) -> Request:
    """Return a request as the engine takes it."""
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        params=params.resolved(),
        is_bounded=params.max_tokens is not None,
        draft=find_method(method).shape(draft or DraftSettings()),
        end_ids=end_ids,
        uses_drafter=uses_drafter,
        grammar=grammar,
    )


def run_all(engine: Engine, arrivals: dict[int, list[Request]]) -> dict[int, tuple[list[int], str]]:
    """Run requests that arrive before the given rounds; return tokens and finish reason of each by id."""
    token_ids: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    round_idx, last_arrival = 0, max(arrivals)
    while round_idx <= last_arrival or engine.has_work:
        for request in arrivals.get(round_idx, []):
            engine.add(engine.check(request))
            token_ids[request.request_id] = []
        for update in engine.step():
            token_ids[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                reasons[update.request_id] = update.finish_reason
        round_idx += 1
    return {i: (token_ids[i], reasons[i]) for i in token_ids}


def plain(target: LanguageModel, **request: object) -> tuple[list[int], str]:
    """Return the tokens and finish reason of plain decoding."""
    token_ids, reason, _ = decode(target, None, method="vanilla", **request)  # type: ignore[arg-type]
    return token_ids, reason


def inline(draft: LanguageModel) -> InlineLink:
    return InlineLink(drafter_for(draft))


def fake(draft: LanguageModel, faults: Faults | None = None) -> FakeLink:
    return FakeLink(lambda: drafter_for(draft), faults or Faults())


def assert_plain_under_any_order(
    make_worker: Callable[[TableModel], DrafterWorker],
    *,
    seed: int,
    agreement: float,
    params: SamplingParams,
    shape: DraftSettings,
    faults: Faults,
) -> RequestStats:
    """Check a text that is drafted beside the target, its messages in disorder. Returns: its counters."""
    target = toy_target(seed)
    link = FakeLink(lambda: make_worker(toy_draft(target, agreement)), faults)
    token_ids, reason, stats = decode(target, link, params=params, draft=shape)
    assert (token_ids, reason) == plain(target, params=params)
    assert not link.status.reason, "no message of an honest drafter is rejected"
    return stats


def assert_plain_in_turns(
    make_worker: Callable[[TableModel], DrafterWorker],
    *,
    seed: int,
    agreement: float,
    params: SamplingParams,
    shape: DraftSettings,
    method: str,
) -> None:
    """Check a text that is drafted in turns with the target."""
    target = toy_target(seed)
    link = InlineLink(make_worker(toy_draft(target, agreement)))
    token_ids, reason, _ = decode(target, link, method=method, params=params, draft=shape)
    assert (token_ids, reason) == plain(target, params=params)


__all__ = [
    "GREEDY",
    "PROMPT",
    "assert_plain_in_turns",
    "assert_plain_under_any_order",
    "decode",
    "drafter_for",
    "fake",
    "inline",
    "make_engine",
    "make_request",
    "plain",
    "replace",
    "run_all",
    "toy_draft",
    "toy_target",
]
