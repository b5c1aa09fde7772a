"""Continuous batching: requests join and leave at any round; each round is one target pass for all that run.

The engine owns the queue and the order of things: listen to the drafter, admit, ask the policy, run the pass, tell the
drafter. It is driven by `step` from one thread at a time and never blocks longer than the policy lets it wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from card.errors import CapacityError, CardError, PromptError, ProtocolError, TargetError, WorkerError, in_words
from card.machine.threads import pinned
from card.policy.rounds import Draft, Outcome, Policy, RoundView, Schedule
from card.transport.link import DrafterLink, LinkStatus
from card.transport.switch import SwitchLink
from card.tree.messages import Declined, DrafterMessage, Layer, Ready, TargetMessage
from card.tree.nodes import Nodes
from card.workers.metrics import EngineStats, RequestStats
from card.workers.request import FinishReason, Request, StepResult, TokenDetails, Work
from card.workers.target import TargetWorker
from card.workers.trace import MIXED, PREFILL, VERIFY, Trace

logger = logging.getLogger(__name__)
_IDLE_PREFILL_CHUNK = 512  # prompt tokens in one pass while no request is waiting for its next token
_LONG_PROMPT = (
    256  # tokens from which prompts are read where `Policy.reading_cores` says: shorter ones are slower there
)
_MOST_FAILED_ROUNDS = 3  # rounds in a row in which no request succeeded; then the target counts as broken
_MOST_DRAFT_PASSES = 64  # in one round, whatever the policy wants


@dataclass(frozen=True, slots=True)
class Update:
    """What one round gave one request."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: RequestStats  # live counters, which go on changing until the request is finished
    error: CardError | None = None  # with finish_reason "error"
    details: TokenDetails = field(default_factory=TokenDetails)  # of these tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much runs at once."""

    max_num_seqs: int = 16
    prefill_chunk: int = 64  # most prompt tokens in a pass that also decodes


@dataclass(slots=True)
class _Entry:
    """One request of the engine: when it came, when it was taken up."""

    request: Request
    arrived_at: float
    stats: RequestStats = field(default_factory=RequestStats)  # the worker's, once it runs
    started_at: float = 0.0
    restarts_before: int = 0
    passes_seen: int = 0  # of the drafter, for this request
    busy_seen_s: float = 0.0
    unheard_at: int = -1  # drafter passes when waiting for it ran out; it is not waited for until there are more


class Engine:
    """Runs any number of requests under one policy; the drafter, if there is one, is reached over ``link``."""

    trace: Trace | None
    """Is told what happens from now on; may be set and taken away at any time."""

    def __init__(
        self,
        worker: TargetWorker,
        link: DrafterLink | None,
        *,
        limits: Limits | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: Trace | None = None,
    ) -> None:
        """Make an engine without requests. ``clock`` gives seconds; all times in the statistics are its own."""
        self.trace = trace
        self._worker = worker
        self._link = link
        self._clock = clock
        self._limits = limits or Limits()
        self._policy = policy or Policy("off" if link is None else "beside" if link.runs_by_itself else "turns")
        self._waiting: deque[_Entry] = deque()
        self._running: dict[int, _Entry] = {}
        self._is_behind = False  # the drafter was not told of what the last passes committed
        self._beam_width: int | None = None
        self._num_failed_rounds = 0
        self._death: str | None = None
        self._totals = EngineStats()

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Raise PromptError if the request can never run: no prompt, foreign tokens, no room in context or memory."""
        prompt_ids, model = request.prompt_ids, self._worker.model
        if not prompt_ids:
            raise PromptError("the prompt is empty; give at least one token")
        if len(prompt_ids) >= model.max_model_len:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.max_model_len} and one must be "
                "left for the answer; shorten the prompt, or raise max_model_len if the model allows it"
            )
        for token_id in prompt_ids:
            if not 0 <= token_id < model.vocab_size:
                raise PromptError(f"token ids must be from 0 to {model.vocab_size - 1}, got {token_id}")
        num_rows = self._worker.rows_needed(request)
        if not self._worker.pool.can_ever_hold(num_rows):
            raise PromptError(
                f"the request may need {num_rows} KV rows ({len(prompt_ids)} tokens of prompt, "
                f"{request.params.max_tokens} new ones), more than kv_cache_memory holds; shorten it, lower max_tokens "
                "or raise kv_cache_memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request. Its id must be new: drafters remember those that were closed.

        Raises: PromptError if it can never run; WorkerError if the target is broken.
        """
        if self._death is not None:
            raise WorkerError(f"the engine is down: {self._death}; start it anew")
        self.check(request)
        self._waiting.append(_Entry(request, self._clock()))

    def abort(self, request_id: int) -> bool:
        """Drop a request at once, with its KV rows and its tree; no update follows. Returns False for an unknown id."""
        for entry in self._waiting:
            if entry.request.request_id == request_id:
                self._waiting.remove(entry)
                return True
        if request_id not in self._running:
            return False
        self._leave(request_id)
        return True

    def step(self) -> list[Update]:
        """Run one round. Returns: what it gave each request that got tokens or ended; nothing if there is no work.

        Raises: WorkerError if the target is broken; `add` raises it too from then on.
        """
        if self._death is not None:
            raise WorkerError(f"the engine is down: {self._death}; start it anew")
        self._listen()
        if not self.has_work:
            return []
        num_requests = min(len(self._running) + len(self._waiting), self._limits.max_num_seqs)
        self._policy.begin(num_requests, self._available())
        started = self._clock()
        refused = self._admit(started)
        with pinned(self._policy.reading_cores if self._only_reads() else self._policy.cores):
            return self._round(started, refused)

    def stats(self) -> EngineStats:
        """Return gauges and totals as of now."""
        pool, totals = self._worker.pool.stats, self._totals
        totals.num_running, totals.num_waiting = len(self._running), len(self._waiting)
        totals.kv_used_bytes, totals.kv_retained_bytes = pool.used_bytes, pool.retained_bytes
        totals.kv_open_sequences, totals.kv_retained_sequences = pool.num_open, pool.num_retained
        totals.prefix_queries, totals.prefix_hits = pool.queries, pool.hits
        totals.prefix_reused_tokens = pool.reused_tokens
        totals.schedule, totals.schedule_reason = self._policy.schedule, self._policy.reason
        totals.tree_nodes = sum(map(self._worker.num_candidates, self._running))
        if self._link:
            status = self._drafter_status(self._link)
            totals.drafter, totals.drafter_reason = status.state, status.reason
            totals.drafter_restarts = status.num_restarts
        return totals.copy()

    def forget_prefixes(self) -> None:
        """Drop the KV that is kept for reuse."""
        self._worker.pool.clear()

    # ---- one round --------------------------------------------------------------------------------------------------

    def _only_reads(self) -> bool:
        """Return whether much of prompts is left to read, and nobody waits for a next token."""
        left = [self._worker.prompt_tokens_left(request_id) for request_id in self._running]
        return 0 not in left and sum(left) >= _LONG_PROMPT

    def _round(self, started: float, updates: list[Update]) -> list[Update]:
        self._tell_drafter_the_schedule()
        work = self._plan_prefill()
        decoding = [entry for i, entry in self._running.items() if not self._worker.prompt_tokens_left(i)]
        view = RoundView(
            requests=[entry.request for entry in decoding],
            num_prompt_tokens=sum(one.num_prompt_tokens for one in work),
            num_context_rows=sum(self._worker.num_context_rows(entry.request.request_id) for entry in decoding),
            takes_turns=self._link is not None and not self._link.runs_by_itself,
        )
        self._prepare(view, decoding)
        offers = self._offers(view)
        work += [Work(r.request_id, offer=offer) for r, offer in zip(view.requests, offers, strict=True)]
        trace = self.trace
        result, errors = self._run(work) if trace is None else self._run_traced(work, trace)
        self._is_behind = self._policy.schedule == "off" or (view.takes_turns and not view.num_passes)
        if not self._is_behind:
            self._send(result.messages)
        ended = self._clock()
        updates += [self._fail(request_id, error) for request_id, error in errors.items()]
        for progress in result.progress:
            stats = self._refresh(progress.request_id, ended)
            if progress.finish_reason is not None:
                self._leave(progress.request_id)
                self._totals.num_finished += 1
            reason, told = progress.finish_reason, progress.details
            updates.append(Update(progress.request_id, progress.token_ids, reason, stats, details=told))
        self._totals.count_round(result.num_tokens, sum(len(u.token_ids) for u in updates), ended - started)
        busy_s, passes = self._drafter_work(decoding)
        if not errors:
            decoding_ids = {request.request_id for request in view.requests}
            num_committed = sum(len(u.token_ids) for u in updates if u.request_id in decoding_ids)
            self._policy.observe(Outcome(view, result, ended - started, num_committed, passes, busy_s))
        return updates

    def _admit(self, now: float) -> list[Update]:
        """Take up waiting requests, first come first served, while there is room and prompts do not pile up.

        A request stays outside until its prompt's turn comes, so that it can reuse what others read meanwhile.
        Returns: the failure of those that the device has no memory for though nothing else runs.
        """
        refused: list[Update] = []
        backlog = sum(self._worker.prompt_tokens_left(i) for i in self._running)
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            entry = self._waiting[0]
            has_room = self._worker.pool.has_room(self._worker.rows_needed(entry.request))
            if backlog >= self._limits.prefill_chunk or not has_room:
                break
            request_id = entry.request.request_id
            try:
                messages = self._worker.add(entry.request)
            except CapacityError as error:
                if self._running:
                    break  # some of them will leave
                self._waiting.popleft()
                self._totals.num_failed += 1
                failure = TargetError(f"the request cannot be taken up: {error}")
                refused.append(Update(request_id, (), "error", entry.stats, failure))
                continue
            self._waiting.popleft()
            entry.started_at, entry.restarts_before = now, self._link.status.num_restarts if self._link else 0
            self._running[request_id] = entry
            entry.stats = self._worker.stats(request_id)
            entry.stats.queued_s = now - entry.arrived_at
            if (trace := self.trace) is not None:
                trace.begin(request_id, entry.arrived_at, now)
            if self._policy.schedule != "off":
                self._send(messages)
            backlog += self._worker.prompt_tokens_left(request_id)
        return refused

    def _plan_prefill(self) -> list[Work]:
        """Share the prompt tokens of this pass among the prompts, oldest first."""
        left = {i: self._worker.prompt_tokens_left(i) for i in self._running}
        chunk = self._limits.prefill_chunk if 0 in left.values() else _IDLE_PREFILL_CHUNK
        work = []
        for request_id, num_left in left.items():
            if num_left and chunk:
                work.append(Work(request_id, num_prompt_tokens=min(num_left, chunk)))
                chunk -= min(num_left, chunk)
        return work

    def _prepare(self, view: RoundView, decoding: list[_Entry]) -> None:
        """Let the drafter draft, or wait for it, as the policy says."""
        link, started = self._link, self._clock()
        if link is None or self._policy.schedule == "off":
            self._totals.drafter_lead = 0.0
            return
        running, view.layers_per_pass = self._running.values(), link.layers_per_pass
        view.num_unread = sum(e.stats.drafter_passes == 0 for e in running if e.request.uses_drafter)
        while True:
            view.requests = [entry.request for entry in decoding]  # the drafter may have declined one
            view.is_up = link.status.state == "up"
            view.best_paths = [self._worker.best_path(entry.request.request_id) for entry in decoding]
            has_drafted = any(depth for depth, _ in view.best_paths)
            if self._worker.has_writers and not view.undrafted and (view.takes_turns or not has_drafted):
                view.undrafted = [self._query(request, asks_drafter=False) for request in view.requests]
            if view.is_up and not view.takes_turns:
                view.num_short = sum(self._is_waited_for(entry) for entry in decoding)
            action = self._policy.prepare(view)
            if action is None or view.num_passes >= _MOST_DRAFT_PASSES:
                break
            if isinstance(action, Draft):
                self._let_catch_up()
                link.draft(action.num_passes)
                view.num_passes += action.num_passes
            else:
                link.wait(action.seconds)
            self._listen()
            view.waited_s = self._clock() - started
        self._totals.drafter_lead = sum(depth for depth, _ in view.best_paths) / max(1, len(view.best_paths))
        if view.waited_s and (trace := self.trace) is not None:
            trace.wait(started, started + view.waited_s, takes_turns=view.takes_turns)
        for entry in decoding if view.waited_s else ():
            stats = entry.stats
            stats.waited_s += view.waited_s
            if not view.takes_turns and self._is_waited_for(entry):
                entry.unheard_at = stats.drafter_passes

    def _offers(self, view: RoundView) -> list[Nodes]:
        """Return what each decoding request verifies."""
        if view.undrafted and not any(depth for depth, _ in view.best_paths):
            offers = list(view.undrafted)  # the drafter has nothing to add
        else:
            offers = [self._query(request, asks_drafter=self._policy.schedule != "off") for request in view.requests]
        if not any(offers):
            return offers
        chosen = self._policy.choose(view, offers)
        return [o.leading(self._worker.rows_left(r.request_id)) for r, o in zip(view.requests, chosen, strict=True)]

    def _query(self, request: Request, *, asks_drafter: bool) -> Nodes:
        draft, writer_budget = request.draft, self._policy.writer_budget(request)
        return self._worker.query(
            request.request_id,
            draft.budget,
            draft.verify,
            writer_budget=writer_budget,
            asks_drafter=asks_drafter,
        )

    def _is_waited_for(self, entry: _Entry) -> bool:
        request_id = entry.request.request_id
        is_heard = entry.stats.drafter_passes != entry.unheard_at
        return is_heard and self._worker.is_short_of_candidates(request_id)

    def _run(self, work: list[Work]) -> tuple[StepResult, dict[int, TargetError]]:
        """Run the pass; if it fails, find the requests that it fails for and let the others go on without them."""
        if not work:
            return StepResult(), {}
        errors: dict[int, TargetError] = {}
        try:
            result = self._worker.step(work)
        except (CardError, RuntimeError, MemoryError) as error:  # out of memory is a RuntimeError in torch
            logger.warning("a target pass for %d requests failed: %s", len(work), error)
            result = self._run_apart(work, error, errors)
        self._num_failed_rounds = 0 if len(errors) < len(work) else self._num_failed_rounds + 1
        if self._num_failed_rounds >= _MOST_FAILED_ROUNDS:
            self._death = (
                f"{self._num_failed_rounds} rounds in a row failed, the last with {next(iter(errors.values()))}"
            )
        return result, errors

    def _run_traced(self, work: list[Work], trace: Trace) -> tuple[StepResult, dict[int, TargetError]]:
        """Run the pass and tell the trace of it."""
        started = self._clock()
        result, errors = self._run(work)
        if work:
            num_prompts = sum(one.num_prompt_tokens > 0 for one in work)
            name = VERIFY if not num_prompts else PREFILL if num_prompts == len(work) else MIXED
            details = {
                "requests": [one.request_id for one in work],
                "tokens": result.num_tokens,
                "candidates": sum(len(one.offer) for one in result.verified),
                "accepted": sum(len(one.accepted) for one in result.verified),
                "schedule": self._policy.schedule,
            }
            trace.target_pass(name, started, started + result.busy_s, details)
        for one in work:
            self._follow(one.request_id, trace)
        return result, errors

    def _follow(self, request_id: int, trace: Trace) -> None:
        """Tell the trace how a request stands, if it is running."""
        if (entry := self._running.get(request_id)) is not None:
            num_candidates = self._worker.num_candidates(request_id)
            trace.follow(request_id, entry.stats, num_candidates, self._clock())

    def _run_apart(self, work: list[Work], error: Exception, errors: dict[int, TargetError]) -> StepResult:
        """Run each half on its own, down to single requests; one that fails even without candidates is given up."""
        if len(work) == 1 and not work[0].offer:
            errors[work[0].request_id] = TargetError(f"the target's pass failed for this request: {in_words(error)}")
            return StepResult()
        middle = len(work) // 2
        total = StepResult()
        for half in (work[:middle], work[middle:]) if middle else ([Work(work[0].request_id)],):
            try:
                total.add(self._worker.step(half))
            except (CardError, RuntimeError, MemoryError) as further:
                total.add(self._run_apart(half, further, errors))
        return total

    def _refresh(self, request_id: int, now: float) -> RequestStats:
        """Bring the counters of a request up to date that the worker does not know."""
        entry = self._running[request_id]
        stats = entry.stats
        stats.wall_s = now - entry.started_at
        stats.prefill_s = stats.prefill_s or stats.wall_s
        if self._link:
            status = self._drafter_status(self._link)
            stats.drafter_restarts = status.num_restarts - entry.restarts_before
            stats.drafter, stats.drafter_reason = status.state, status.reason
            stats.schedule, stats.schedule_reason = self._policy.schedule, self._policy.reason
        if not entry.request.params.speculates:
            stats.schedule, stats.schedule_reason = "off", "the request wants none"
        elif stats.declined:
            stats.schedule, stats.schedule_reason = "off", stats.declined
        return stats

    def _drafter_status(self, link: DrafterLink) -> LinkStatus:
        """Return what users are told of the drafter: with two of them, of the one that does worse."""
        return link.worst_status if isinstance(link, SwitchLink) else link.status

    def _available(self) -> frozenset[Schedule]:
        """Return the schedules that are possible now."""
        if isinstance(self._link, SwitchLink):
            return self._link.available
        is_up = self._link is not None and self._link.status.state in ("up", "degraded")
        if self._link is None or not is_up:
            return frozenset({"off"})
        return frozenset({"off", "beside" if self._link.runs_by_itself else "turns"})

    def _drafter_work(self, decoding: list[_Entry]) -> tuple[float, int]:
        """Return the seconds and passes that the drafter reported for these requests since their last round."""
        new_busy_s, new_passes = 0.0, 0
        for entry in decoding:
            stats = entry.stats
            new_passes += stats.drafter_passes - entry.passes_seen
            new_busy_s += stats.drafter_busy_s - entry.busy_seen_s
            entry.passes_seen, entry.busy_seen_s = stats.drafter_passes, stats.drafter_busy_s
        return new_busy_s, new_passes

    def _fail(self, request_id: int, error: TargetError) -> Update:
        stats = self._refresh(request_id, self._clock())
        self._leave(request_id)
        self._totals.num_failed += 1
        return Update(request_id, (), "error", stats, error)

    def _leave(self, request_id: int) -> None:
        del self._running[request_id]
        if (trace := self.trace) is not None:
            trace.end(request_id, self._clock())
        self._send(self._worker.remove(request_id))

    # ---- the drafter ------------------------------------------------------------------------------------------------

    def _tell_drafter_the_schedule(self) -> None:
        """Let a drafter that rested catch up if it runs by itself, and tune its beams."""
        if isinstance(self._link, SwitchLink):
            self._link.use(self._policy.schedule)
        if self._policy.schedule == "beside":
            self._let_catch_up()
        beam_width = self._policy.beam_width()
        if beam_width != self._beam_width:
            self._beam_width = beam_width
            self._worker.tune(beam_width)

    def _let_catch_up(self) -> None:
        """Tell the drafter what it missed while nobody wanted to hear it."""
        if self._is_behind:
            self._is_behind = False
            self._send(self._worker.catch_up())

    def _listen(self) -> None:
        """Give the worker everything that the drafter has said."""
        if self._link is None:
            return
        for message in self._link.receive():
            if isinstance(message, Ready):
                if (trace := self.trace) is not None:
                    trace.drafter_came()
                self._send(self._worker.reopen())
                continue
            try:
                self._send(self._worker.receive(message))
            except ProtocolError as error:
                self._link.reject(str(error))
                return
            if isinstance(message, Declined) and (entry := self._running.get(message.request_id)) is not None:
                entry.request = self._worker.request(message.request_id)
            if (trace := self.trace) is not None:
                self._tell(message, trace)

    def _tell(self, message: DrafterMessage, trace: Trace) -> None:
        """Tell the trace what the drafter has said."""
        if isinstance(message, Layer):
            trace.layer(message, self._clock())
            self._follow(message.request_id, trace)

    def _send(self, messages: list[TargetMessage]) -> None:
        if self._link is not None:
            for message in messages:
                self._link.send(message)
            if (trace := self.trace) is not None:
                trace.sent(messages, self._clock())
