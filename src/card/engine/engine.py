"""Continuous batching: requests join and leave at any round; each round is one target pass for all that run.

The engine owns the queue and the order of things: listen to the drafter, admit, ask the policy, run the pass, tell the
drafter. It is driven by `step` from one thread at a time and never blocks longer than the policy lets it wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from card.engine.dialogue import Dialogue
from card.engine.passes import TargetPasses
from card.engine.phases import Phases
from card.engine.running import RunningRequest, WaitingRequest
from card.engine.tracing import NoTracing, Tracing
from card.errors import CapacityError, TargetError
from card.machine.threads import pinned
from card.policy.rounds import Draft, Outcome, Policy, RoundView
from card.transport.link import DrafterLink, NoDrafter
from card.tree.nodes import Nodes
from card.workers.metrics import EngineStats
from card.workers.request import CheckedRequest, FinishReason, Request, Update
from card.workers.sequence import Sequence, Work
from card.workers.target import TargetWorker
from card.workers.trace import Trace

_IDLE_PREFILL_CHUNK = 512  # prompt tokens in one pass while no request is waiting for its next token
_LONG_PROMPT = (
    256  # tokens from which prompts are read where `Policy.reading_cores` says: shorter ones are slower there
)
_MOST_DRAFT_PASSES = 64  # in one round, whatever the policy wants


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the work that runs at once."""

    max_num_seqs: int = 16
    prefill_chunk: int = 64  # most prompt tokens in a pass that also decodes


class Engine:
    """Runs any number of requests under one policy; the drafter, if there is one, is reached over ``link``."""

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
        self._worker = worker
        self._passes = TargetPasses(worker)
        link = NoDrafter() if link is None else link
        self._drafter = Dialogue(worker, link)
        self._clock = clock
        self.trace = trace
        self._limits = limits or Limits()
        self._policy = policy or Policy(link.own_schedule)
        self._waiting: deque[WaitingRequest] = deque()
        self._running: dict[int, RunningRequest] = {}
        self._paused: dict[int, RunningRequest] = {}  # whose rows are in the worker's store, the longest first
        self._phases = Phases()
        self._totals = EngineStats()

    @property
    def trace(self) -> Trace | None:
        """Is told what happens from now on; may be set and taken away at any time."""
        return self._drafter.tracing.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._drafter.tracing = NoTracing() if trace is None else Tracing(trace, self._clock)

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return bool(self._waiting or self._running or self._paused)

    def check(self, request: Request) -> CheckedRequest:
        """Return the request as `add` takes it. Raises: PromptError if it can never run; see `TargetWorker.check`."""
        return self._worker.check(request)

    def add(self, checked: CheckedRequest) -> None:
        """Queue a request. Its id must be new: drafters remember those that were closed.

        Raises: WorkerError if the target is broken.
        """
        self._passes.check_alive()
        self._waiting.append(WaitingRequest(checked, self._clock()))

    def abort(self, request_id: int) -> Update | None:
        """Drop a request at once, with its KV rows and its tree.

        Returns: its last update; None for an unknown id.
        """
        for entry in self._waiting:
            if (request := entry.checked.request).request_id == request_id:
                self._waiting.remove(entry)
                return Update(request_id, (), "abort", request.new_stats())
        is_known = request_id in self._running or request_id in self._paused
        return self._end(request_id, "abort") if is_known else None

    def step(self) -> list[Update]:
        """Run one round. Returns: what it gave each request that got tokens or ended; nothing if there is no work.

        Raises: WorkerError if the target is broken; `add` raises it too from then on.
        """
        self._passes.check_alive()
        self._drafter.listen()
        if not self.has_work:
            return []
        num_all = len(self._running) + len(self._waiting) + len(self._paused)
        num_requests = min(num_all, self._limits.max_num_seqs)
        self._policy.begin(num_requests, self._drafter.link.available)
        started = self._clock()
        refused = self._admit(started)
        with pinned(self._policy.reading_cores if self._only_reads() else self._policy.cores):
            return self._round(started, refused)

    def stats(self) -> EngineStats:
        """Return gauges and totals as of now."""
        pool, totals = self._worker.pool.stats, self._totals
        totals.num_running, totals.num_waiting = len(self._running), len(self._waiting) + len(self._paused)
        store = self._worker.row_store
        totals.kv_offloaded_bytes = 0 if store is None else store.used_bytes
        totals.kv_used_bytes, totals.kv_retained_bytes = pool.used_bytes, pool.retained_bytes
        totals.kv_open_sequences, totals.kv_retained_sequences = pool.num_open, pool.num_retained
        totals.prefix_queries, totals.prefix_hits = pool.queries, pool.hits
        totals.prefix_reused_tokens = pool.reused_tokens
        totals.chains_only = self._worker.runs_chains_only
        totals.schedule, totals.schedule_reason = self._policy.schedule, self._policy.reason
        totals.tree_nodes = sum(one.sequence.num_candidates for one in self._running.values())
        status = self._drafter.status
        totals.drafter, totals.drafter_reason = status.state, status.reason
        totals.drafter_restarts = status.num_restarts
        return totals.copy()

    def forget_prefixes(self) -> None:
        """Drop the KV that is kept for reuse."""
        self._worker.pool.clear()

    # ---- one round --------------------------------------------------------------------------------------------------

    def _only_reads(self) -> bool:
        """Return whether much of prompts is left to read, and nobody waits for a next token."""
        left = [one.sequence.prompt_tokens_left for one in self._running.values()]
        return 0 not in left and sum(left) >= _LONG_PROMPT

    def _round(self, started: float, updates: list[Update]) -> list[Update]:
        self._drafter.follow(self._policy.schedule, self._policy.beam_width())
        work = self._plan_prefill()
        drafting, decoding = self._in_phases()
        view = RoundView(
            requests=[one.sequence.request for one in decoding],
            num_prompt_tokens=sum(one.num_prompt_tokens for one in work),
            num_context_rows=sum(one.sequence.num_rows for one in decoding),
            takes_turns=self._drafter.takes_turns,
        )
        self._prepare(view, decoding)
        offers = self._offers(view, decoding)
        work += [Work(one.sequence, offer=offer) for one, offer in zip(decoding, offers, strict=True)]
        work += [Work(one.sequence, drafts=True) for one in drafting]
        pass_started = self._clock()
        result, errors = self._passes.run(work)
        self._drafter.tracing.passed(work, result, pass_started, self._policy.schedule)
        rests = self._policy.schedule == "off" or (view.takes_turns and not view.num_passes)
        self._drafter.tell_round(result.messages, is_heard=not rests)
        seconds = self._clock() - started
        updates += [self._end(request_id, "error", error) for request_id, error in errors.items()]
        updates += self._finish(result.updates)
        self._totals.count_round(result.num_tokens, sum(len(u.token_ids) for u in updates), seconds)
        drafter_work = [one.new_drafter_work() for one in decoding]
        if not errors:
            decoding_ids = {request.request_id for request in view.requests}
            num_committed = sum(len(u.token_ids) for u in updates if u.request_id in decoding_ids)
            busy_s, passes = sum(busy_s for busy_s, _ in drafter_work), sum(passes for _, passes in drafter_work)
            self._policy.observe(Outcome(view, result, seconds, num_committed, passes, busy_s))
        return updates

    def _finish(self, updates: list[Update]) -> list[Update]:
        """Bring the counters up to date that these updates tell, and let go of requests that are over."""
        now = self._clock()
        for update in updates:
            self._running[update.request_id].refresh(now, self._drafter.status, self._policy)
            if update.finish_reason is not None:
                self._leave(update.request_id)
                self._totals.num_finished += 1
        return updates

    def _admit(self, now: float) -> list[Update]:
        """Take up waiting requests, first come first served, while there is room and prompts do not pile up.

        A request stays outside until its prompt's turn comes, so that it can reuse what others read meanwhile.
        Returns: the failure of those that the device has no memory for though nothing else runs.
        """
        refused: list[Update] = []
        backlog = sum(one.sequence.prompt_tokens_left for one in self._running.values())
        while len(self._running) < self._limits.max_num_seqs and backlog < self._limits.prefill_chunk:
            entry = self._waiting[0] if self._waiting else None
            if entry is None or self._is_turn_of_paused(entry) or not self._has_room(entry, now):
                if not self._resume():
                    break
                continue
            try:
                sequence = self._worker.add(entry.checked)
            except CapacityError as error:
                if self._running:
                    break  # some of them will leave
                request, failure = entry.checked.request, TargetError(f"the request cannot be taken up: {error}")
                refused.append(Update(request.request_id, (), "error", request.new_stats(), failure))
                self._totals.num_failed += 1
            else:
                self._take_up(sequence, entry.arrived_at, now)
                backlog += sequence.prompt_tokens_left
            self._waiting.popleft()
        is_alone = not self._running and not self._worker.pool.stats.num_open  # texts to be scored have rows, too
        if self._paused and is_alone and not refused:
            request_id = next(iter(self._paused))
            refused.append(self._end(request_id, "error", TargetError("a paused request has no memory to go on in")))
        return refused

    def _is_turn_of_paused(self, entry: WaitingRequest) -> bool:
        """Return whether a paused request comes before a waiting one: if it was paused before that one arrived."""
        oldest = next(iter(self._paused.values()), None)
        return oldest is not None and oldest.paused_at is not None and oldest.paused_at < entry.arrived_at

    def _resume(self) -> bool:
        """Let the request go on that was paused first. Returns: whether there is one, and room for it."""
        request_id, one = next(iter(self._paused.items()), (None, None))
        if one is None or request_id is None or not self._worker.resume(one.sequence):
            return False
        self._running[request_id] = self._paused.pop(request_id)
        return True

    def _has_room(self, entry: WaitingRequest, now: float) -> bool:
        """Return whether there is room for a waiting request, perhaps that of a running one, which is paused."""
        return self._worker.pool.has_room(entry.checked.num_rows) or self._make_room(entry, now)

    def _make_room(self, entry: WaitingRequest, now: float) -> bool:
        """Pause the running request with the most tokens to go, if a waiting one wants fewer. Returns: whether it was.

        Nobody is paused twice, and only those that waited then overtake him. So every text comes to its end.
        """
        if self._worker.row_store is None:
            return False
        able = [one for one in self._running.values() if one.can_pause]
        longest = max(able, key=lambda one: one.tokens_left, default=None)
        if longest is None or longest.tokens_left <= entry.checked.request.params.max_tokens:
            return False
        pool, sequence = self._worker.pool, longest.sequence
        if not pool.has_room(entry.checked.num_rows, without=sequence.slot):
            return False
        longest.paused_at = now  # whether there is room in the store or not: it is tried once
        if not self._worker.pause(sequence):
            return False
        self._paused[sequence.request.request_id] = self._running.pop(sequence.request.request_id)
        return True

    def _take_up(self, sequence: Sequence, arrived_at: float, now: float) -> None:
        request_id = sequence.request.request_id
        self._running[request_id] = RunningRequest(sequence, now, self._drafter.status.num_restarts)
        sequence.stats.queued_s = now - arrived_at
        self._drafter.tracing.taken_up(request_id, arrived_at, now)
        if self._policy.schedule != "off":
            self._drafter.send(sequence.opening())

    def _plan_prefill(self) -> list[Work]:
        """Share the prompt tokens of this pass among the prompts, oldest first."""
        left = [(one.sequence, one.sequence.prompt_tokens_left) for one in self._running.values()]
        chunk = self._limits.prefill_chunk if any(not num_left for _, num_left in left) else _IDLE_PREFILL_CHUNK
        work = []
        for sequence, num_left in left:
            if num_left and chunk:
                work.append(Work(sequence, num_prompt_tokens=min(num_left, chunk)))
                chunk -= min(num_left, chunk)
        return work

    def _in_phases(self) -> tuple[list[RunningRequest], list[RunningRequest]]:
        """Return the decoding requests that draft a token for themselves in this round, and those that verify."""
        drafting, verifying = list[RunningRequest](), list[RunningRequest]()
        self._phases.begin_round()
        for request_id, one in self._running.items():
            sequence = one.sequence
            if sequence.prompt_tokens_left:
                continue
            draft, length = sequence.self_draft, sequence.request.draft.num_speculative_tokens
            is_due = draft is not None and draft.has_phases and self._phases.is_due(request_id, length)
            (drafting if sequence.can_draft_itself and not is_due else verifying).append(one)
        return drafting, verifying

    def _prepare(self, view: RoundView, decoding: list[RunningRequest]) -> None:
        """Let the drafter draft, or wait for it, as the policy says."""
        link = self._drafter.link
        if self._policy.schedule == "off":
            self._totals.drafter_lead = 0.0
            return
        view.layers_per_pass = link.layers_per_pass
        running = [one.sequence for one in self._running.values()]
        view.num_unread = sum(one.stats.drafter_passes == 0 for one in running if one.request.uses_drafter)
        if self._worker.has_writers and (view.takes_turns or not any(one.sequence.best_path[0] for one in decoding)):
            view.undrafted = [self._query(one.sequence, asks_drafter=False) for one in decoding]
        started = self._clock()  # what writers take is none of the drafter's time
        while True:
            view.requests = [one.sequence.request for one in decoding]  # the drafter may have declined one
            view.is_up = link.status.state == "up"
            view.best_paths = [one.sequence.best_path for one in decoding]
            if view.is_up and not view.takes_turns:
                view.num_short = sum(one.is_waited_for for one in decoding)
            action = self._policy.prepare(view)
            if action is None or view.num_passes >= _MOST_DRAFT_PASSES:
                break
            if isinstance(action, Draft):
                self._drafter.let_catch_up()
                link.draft(action.num_passes)
                view.num_passes += action.num_passes
            else:
                link.wait(action.seconds)
            self._drafter.listen()
            view.waited_s = self._clock() - started
        self._totals.drafter_lead = sum(depth for depth, _ in view.best_paths) / max(1, len(view.best_paths))
        self._drafter.tracing.waited(started, view.waited_s, takes_turns=view.takes_turns)
        for one in decoding if view.waited_s else ():
            one.sequence.stats.waited_s += view.waited_s
            if not view.takes_turns and one.is_waited_for:
                one.unheard_at = one.sequence.stats.drafter_passes

    def _offers(self, view: RoundView, decoding: list[RunningRequest]) -> list[Nodes]:
        """Return what each decoding request verifies."""
        if view.undrafted and not any(depth for depth, _ in view.best_paths):
            offers = list(view.undrafted)  # the drafter has nothing to add
        else:
            offers = [self._query(one.sequence, asks_drafter=self._policy.schedule != "off") for one in decoding]
        if not any(offers):
            return offers
        chosen = self._policy.choose(view, offers)
        rows_left = [self._worker.rows_left(one.sequence) for one in decoding]
        return [offer.leading(most) for offer, most in zip(chosen, rows_left, strict=True)]

    def _query(self, sequence: Sequence, *, asks_drafter: bool) -> Nodes:
        writer_budget = self._policy.writer_budget(sequence.request)
        return self._worker.query(sequence, writer_budget=writer_budget, asks_drafter=asks_drafter)

    def _end(self, request_id: int, reason: FinishReason, error: TargetError | None = None) -> Update:
        """Drop a running request before its text has ended; return its last update."""
        one = self._running.get(request_id) or self._paused[request_id]
        one.refresh(self._clock(), self._drafter.status, self._policy)
        self._leave(request_id)
        self._totals.num_failed += error is not None
        return Update(request_id, (), reason, one.sequence.stats, error)

    def _leave(self, request_id: int) -> None:
        sequence = (self._running.pop(request_id, None) or self._paused.pop(request_id)).sequence
        self._phases.leave(request_id)
        self._drafter.tracing.ended(request_id)
        self._drafter.send(self._worker.remove(sequence))
