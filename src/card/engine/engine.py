"""Continuous batching: requests join and leave at any round; each round is one target pass for all that run.

The engine sets the order of a round: listen to the drafter, admit, ask the policy, run the pass, tell the drafter.
One thread at a time drives it with `step`, which never blocks longer than the policy lets it wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from card.engine.asked import AskedRounds
from card.engine.dialogue import Dialogue
from card.engine.failures import Failures
from card.engine.guarded_policy import GuardedPolicy
from card.engine.live import LiveRequest
from card.engine.metrics import EngineStats
from card.engine.passes import TargetPasses
from card.engine.phases import Phases
from card.engine.policy.rounds import Outcome, Policy, RoundView
from card.engine.queue import Limits, RequestQueue
from card.engine.request import FinishReason, Request, StepResult, Update
from card.engine.sequence import Sequence, Work
from card.engine.target import TargetWorker
from card.engine.target_pass import MASK_WAIT_S
from card.engine.trace import Trace
from card.engine.tracing import NoTracing, Tracing
from card.engine.turn import DraftingTurn, num_short
from card.errors import TargetError
from card.links.link import DrafterLink, NoDrafter
from card.machine.threads import pinned
from card.tree.nodes import NO_NODES, Nodes

_LONG_PROMPT = 256  # prompts with so many tokens run on `Policy.reading_cores`; shorter ones are slower there


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
    ) -> None:
        """Make an engine without requests. ``clock`` gives seconds; all times in the statistics use it."""
        self._worker = worker
        self._passes = TargetPasses(worker)
        link = NoDrafter() if link is None else link
        self._drafter = Dialogue(worker, link)
        self._clock = clock
        self._limits = limits or Limits()
        self._queue = RequestQueue(worker, self._limits)
        self._policy = policy or Policy(link.own_schedule)
        self._calls = GuardedPolicy(self._policy)
        self._phases = Phases()
        self._asked, self._resting = AskedRounds(), set[int]()  # requests whose local writers rest in this round
        self._totals = EngineStats()

    @property
    def trace(self) -> Trace | None:
        """Record of what happens from now on; may be set and removed at any time."""
        return self._drafter.tracing.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._drafter.tracing = NoTracing() if trace is None else Tracing(trace, self._clock)

    @property
    def has_work(self) -> bool:
        """True if `step` would do something."""
        return bool(self._queue)

    def check(self, request: Request) -> LiveRequest:
        """Check a request for `add`. Raises: PromptError if it can never run; see `TargetWorker.check`."""
        return self._worker.check(request)

    def add(self, one: LiveRequest) -> None:
        """Queue a request. Its id must be new: drafters remember the ids of closed requests.

        Raises: WorkerError if the target is broken.
        """
        self._passes.check_alive()
        self._queue.add(one, self._clock())

    def abort(self, request_id: int) -> Update | None:
        """Drop a request at once, with its KV rows and its tree.

        Returns: its last update; None for an unknown id.
        """
        withdrawn = self._queue.withdraw(request_id)
        if withdrawn is not None:
            return Update(request_id, (), "abort", withdrawn.new_stats())
        return self._end(request_id, "abort") if self._queue.find(request_id) else None

    def step(self) -> list[Update]:
        """Run one round. Returns: an update for each request that got tokens or ended; empty if there is no work.

        Raises: WorkerError if the target is broken; `add` raises it too from then on.
        """
        self._passes.check_alive()
        started = self._clock()  # listening is a part of the round: a drafter that says much costs time
        self._drafter.listen()
        if not self.has_work:
            return []
        num_requests = min(len(self._queue), self._limits.max_num_seqs)
        self._calls.begin(num_requests, self._drafter.link.available)
        refused: list[Update] = []
        if self._queue.num_waiting or self._worker.moves is not None:
            with pinned(self._policy.cores):  # reused rows are copied with as many threads as a pass has
                refused = self._admit(started)
        with pinned(self._policy.reading_cores if self._queue.only_reads(_LONG_PROMPT) else self._policy.cores):
            return self._round(started, refused)

    def num_read(self, request_id: int) -> tuple[int, int]:
        """Return how many tokens of a request's text have rows by now, and how many of these another text's were.

        A request that does not run has none. Any thread may ask.
        """
        running = self._queue.find(request_id)
        return (0, 0) if running is None else (running.sequence.num_rows, running.sequence.stats.reused_prompt_tokens)

    def stats(self) -> EngineStats:
        """Return gauges and totals as of now."""
        pool, totals = self._worker.pool.stats, self._totals
        totals.num_running, totals.num_waiting = len(self._queue.running), self._queue.num_waiting
        if (moves := self._worker.moves) is not None:
            totals.kv_offloaded_bytes, totals.kv_moved_bytes = moves.stored_bytes, moves.moved_bytes
            totals.num_pauses = moves.num_pauses
        totals.kv_used_bytes, totals.kv_retained_bytes = pool.used_bytes, pool.retained_bytes
        totals.kv_open_sequences, totals.kv_retained_sequences = pool.num_open, pool.num_retained
        totals.prefix_queries, totals.prefix_hits = pool.queries, pool.hits
        totals.prefix_reused_tokens, totals.prefix_read_tokens = pool.reused_tokens, pool.read_tokens
        totals.chains_only = self._worker.runs_chains_only
        totals.schedule, totals.schedule_reason = self._policy.schedule, self._policy.reason
        totals.asked_rounds = dict(self._asked.counts)
        if not totals.num_running:
            totals.drafter_lead = 0.0
        totals.tree_nodes = sum(one.sequence.num_candidates for one in self._queue.running.values())
        status = self._drafter.status
        totals.drafter, totals.drafter_reason = status.state, status.reason
        totals.drafter_restarts = status.num_restarts
        return totals.copy()

    def forget_prefixes(self) -> None:
        """Drop the KV rows that are kept for reuse."""
        self._worker.pool.clear()

    # ---- one round --------------------------------------------------------------------------------------------------

    def _round(self, started: float, updates: list[Update]) -> list[Update]:
        failures = Failures()  # of single requests, before the pass and after it
        self._resting.clear()
        self._drafter.follow(self._policy.schedule, self._calls.beam_width())
        work = self._queue.plan_prefill()
        drafting, decoding = self._in_phases()
        view = self._view(decoding, work, failures)
        view = self._after_turn(view, decoding)
        offers = self._offers(view, decoding, failures)
        self._asked.count(
            decoding,
            resting=self._resting,
            drafter=self._drafter.status.state,
            schedule=self._policy.schedule,
            undrafted=self._policy.undrafted,
        )
        work += [Work(one.sequence, offer=offer) for one, offer in zip(decoding, offers, strict=True)]
        work += [Work(one.sequence, drafts=True) for one in drafting]
        if not work:
            self._wait_for_masks()
        is_heard = self._policy.schedule != "off" and (view.has_drafted or not view.takes_turns)
        pass_started = self._clock()
        result, errors = self._passes.run(work, is_heard=is_heard)
        self._drafter.tracing.passed(work, result, pass_started, self._policy.schedule)
        self._drafter.tell_round(result.messages, is_heard=is_heard)
        seconds = self._clock() - started
        failures.take_in(result.failures)
        updates += self._finish(result.updates, failures)
        self._totals.count_round(result.num_tokens, sum(len(u.token_ids) for u in updates), seconds)
        if view.num_prompt_tokens and result.num_tokens and result.busy_s > 0:
            self._totals.count_reading(result.num_tokens, result.busy_s)
        errors |= failures.errors
        updates += [self._end(one, "error", error) for one, error in errors.items() if self._queue.find(one)]
        if work and not errors:
            self._calls.observe(self._outcome(view, result, seconds, decoding))
        return updates

    def _outcome(self, view: RoundView, result: StepResult, seconds: float, decoding: list[LiveRequest]) -> Outcome:
        """Return the outcome for the policy to learn from."""
        decoding_ids = {request.request_id for request in view.requests}
        num_committed = sum(len(u.token_ids) for u in result.updates if u.request_id in decoding_ids)
        busy_s, num_passes = 0.0, 0
        for one in decoding if self._policy.schedule == "beside" else ():
            its_busy_s, its_passes = one.new_drafter_work()
            busy_s, num_passes = busy_s + its_busy_s, num_passes + its_passes
        return Outcome(view, result, seconds, num_committed, num_passes, busy_s)

    def _wait_for_masks(self) -> None:
        """Wait for a moment: the grammars of all running requests still compute what they permit."""
        held_up = next((one.sequence for one in self._queue.running.values() if one.sequence.is_held_up), None)
        if held_up is not None and held_up.masks is not None:
            held_up.masks.settle([()], MASK_WAIT_S)

    def _finish(self, updates: list[Update], failures: Failures) -> list[Update]:
        """Add these updates to the counters, and remove requests that have ended."""
        now = self._clock()
        for update in updates:
            with failures.of(update.request_id):
                self._queue.running[update.request_id].refresh(now, self._drafter.status, self._policy)
            if update.finish_reason is not None:
                self._leave(update.request_id, is_finished=True)
                self._totals.num_finished += 1
        return updates

    def _admit(self, now: float) -> list[Update]:
        """Let the queue admit requests, and tell the drafter. Returns: the failures of those that can never run."""
        self._queue.make_room_to_grow()
        taken_up, failed = self._queue.admit(now, self._drafter.status.num_restarts)
        self._totals.num_failed += len(failed)
        for one in taken_up:
            one.sequence.stats.queued_s = now - one.arrived_at
            self._drafter.tracing.taken_up(one.request_id, one.arrived_at, now)
            if self._policy.schedule != "off":
                self._drafter.send(one.sequence.opening())
        stranded_id = self._queue.stranded_id
        if stranded_id is not None and not failed:
            failed.append(self._end(stranded_id, "error", TargetError("a paused request finds no memory to continue")))
        return failed

    def _in_phases(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Return the decoding requests that draft for themselves in this round, and those that verify."""
        drafting, verifying = list[LiveRequest](), list[LiveRequest]()
        self._phases.begin_round()
        for request_id, one in self._queue.running.items():
            sequence = one.sequence
            if sequence.prompt_tokens_left or sequence.is_held_up:
                continue
            draft, length = sequence.self_draft, sequence.request.draft.num_speculative_tokens
            is_due = draft is not None and draft.has_phases and self._phases.is_due(request_id, length)
            (drafting if sequence.can_draft_itself and not is_due else verifying).append(one)
        return drafting, verifying

    def _view(self, decoding: list[LiveRequest], reading: list[Work], failures: Failures) -> RoundView:
        """Return the policy's view of a round before any drafting."""
        takes_turns, is_off = self._drafter.takes_turns, self._policy.schedule == "off"
        undrafted = list[Nodes]()
        if takes_turns and not is_off and self._has_writers(decoding):
            undrafted = [self._query(one.sequence, failures, asks_drafter=False) for one in decoding]
        return RoundView(
            requests=[one.sequence.request for one in decoding],
            num_prompt_tokens=sum(one.num_prompt_tokens for one in reading),
            num_context_rows=sum(one.sequence.num_rows for one in decoding),
            takes_turns=takes_turns,
            layers_per_pass=self._drafter.link.layers_per_pass,
            undrafted=undrafted,
            num_short=0 if takes_turns or is_off else num_short(self._drafter, decoding),
            num_prompt_pairs=sum(one.num_prompt_tokens * one.sequence.num_rows for one in reading),
        )

    def _after_turn(self, view: RoundView, decoding: list[LiveRequest]) -> RoundView:
        """Let the drafter draft, or wait for it, as the policy says. Returns: the view afterwards."""
        self._totals.drafter_lead = 0.0
        if self._policy.schedule == "off":
            return view
        turn = DraftingTurn(view, decoding, self._drafter, self._calls, self._clock, self._clock())
        while turn.step():
            pass
        depths = [one.sequence.candidates_depth for one in decoding]
        self._totals.drafter_lead = sum(depths) / max(1, len(depths))
        return turn.view

    def _offers(self, view: RoundView, decoding: list[LiveRequest], failures: Failures) -> Iterable[Nodes]:
        """Return what each decoding request verifies; without any candidates, what plain decoding runs."""
        asks_drafter = view.has_drafted or self._policy.schedule == "beside"
        if view.undrafted and not asks_drafter:
            offers = list(view.undrafted)
        elif asks_drafter or self._has_writers(decoding):
            offers = [self._query(one.sequence, failures, asks_drafter=asks_drafter) for one in decoding]
        else:
            return [NO_NODES] * len(decoding)
        if not any(offers):
            return offers
        chosen = self._calls.choose(view, offers)
        rows_left = [self._worker.rows_left(one.sequence) for one in decoding]
        return [offer.leading(most) for offer, most in zip(chosen, rows_left, strict=True)]

    def _has_writers(self, decoding: list[LiveRequest]) -> bool:
        return self._worker.has_writers or any(one.sequence.offers.is_guided for one in decoding)

    def _query(self, sequence: Sequence, failures: Failures, *, asks_drafter: bool) -> Nodes:
        with failures.of(sequence.request.request_id):
            writer_budget = self._policy.writer_budget(sequence.request) if self._worker.has_writers else 0
            if not writer_budget:
                self._resting.add(sequence.request.request_id)
            if writer_budget or asks_drafter or sequence.offers.is_guided:
                return self._worker.query(sequence, writer_budget=writer_budget, asks_drafter=asks_drafter)
        return NO_NODES

    def _end(self, request_id: int, reason: FinishReason, error: TargetError | None = None) -> Update:
        """Drop a running request before its text has ended; return its last update."""
        one = self._leave(request_id, is_finished=False)
        one.refresh(self._clock(), self._drafter.status, self._policy)
        self._totals.num_failed += error is not None
        return Update(request_id, (), reason, one.sequence.stats, error)

    def _leave(self, request_id: int, *, is_finished: bool) -> LiveRequest:
        one = self._queue.leave(request_id, is_finished=is_finished)
        self._phases.leave(request_id)
        self._drafter.tracing.ended(request_id)
        self._drafter.send(self._worker.remove(one.sequence))
        return one
