"""Figures of the server: of each text as it is written, and sums over all texts.

A request's counters live in its `RequestStats`, which the engine keeps anyway. The sums add those of running requests
to the totals of finished ones. Nothing is counted per token.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from card.api.outputs import StreamChunk
from card.engine.metrics import RequestStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000)
HISTOGRAMS = {  # name, without prefix -> description, buckets
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two pieces of a text, each of one token or more.", _SECONDS),
    "request_time_per_output_token_seconds": ("Decoding time over tokens, of a finished request.", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("Waiting for a place in the batch.", _SECONDS),
    "request_prefill_time_seconds": ("From the place in the batch to the first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", _TOKENS),
}
COUNTERS = {  # name, without prefix -> description, counter of RequestStats that is summed
    "prompt_tokens": ("Tokens of prompts.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens written.", "num_new_tokens"),
    "verifications": ("Target passes of a request after its prompt: query, verify, correct.", "target_passes"),
    "candidates_verified": ("Candidates that went through the target.", "verified_tokens"),
    "candidates_accepted": ("Candidates that became text.", "accepted_tokens"),
    "target_busy_seconds": ("Time of requests inside the target's passes.", "target_busy_s"),
    "target_stall_seconds": ("Time of requests in which the target waited for candidates.", "waited_s"),
    "drafter_passes": ("Passes of the draft model, counted for each request in them.", "drafter_passes"),
    "drafter_busy_seconds": ("Time of these passes.", "drafter_busy_s"),
    "drafter_dropped_nodes": ("Candidates ruled out by what was committed.", "drafter_dropped_nodes"),
    "drafter_rolled_back_tokens": ("Of these, those thought likeliest.", "rolled_back_tokens"),
    "prompt_tokens_reused": ("Tokens of prompts with KV from earlier requests.", "reused_prompt_tokens"),
}
_OF_PROMPTS = ("num_prompt_tokens", "reused_prompt_tokens")  # counted once for all texts of a prompt
_SUMS = ("hits", "late_hits", *(counter for _, counter in COUNTERS.values()))
FALLBACKS = ("request", "policy", "drafter", "no_candidates")


@dataclass(slots=True, eq=False)
class TextRecord:
    """One text of a request as it is written: its statistics, and the times of its pieces."""

    _ledger: Ledger
    stats: RequestStats
    speculates: bool
    is_first: bool = True  # of the texts of its prompt
    arrived_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0  # first token
    last_at: float = 0.0
    finish_reason: str = "abort"  # until another one is known
    _num_plain: int = 0  # rounds without candidates seen so far

    def add_chunk(self, chunk: StreamChunk) -> None:
        """Record the next piece."""
        now = time.perf_counter()
        stats = self.stats = chunk.stats
        if chunk.token_ids:
            if self.started_at:
                self._ledger.observe("inter_token_latency_seconds", now - self.last_at)
            else:
                self.started_at = now
            self.last_at = now
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        num_plain = stats.target_passes - (stats.offered_per_depth[0] if stats.offered_per_depth else 0)
        if num_plain > self._num_plain:
            self._ledger.fallbacks[_cause(stats, speculates=self.speculates)] += num_plain - self._num_plain
            self._num_plain = num_plain


def _cause(stats: RequestStats, *, speculates: bool) -> str:
    """Return why the last round of a request had no candidates."""
    if not speculates:
        return "request"
    if stats.schedule == "off":
        return "policy"
    return "no_candidates" if stats.drafter in ("up", "none") else "drafter"


class Ledger:
    """Records of running texts, and sums over finished ones. Only for the event loop."""

    def __init__(self) -> None:
        self.fallbacks = dict.fromkeys(FALLBACKS, 0)
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.errors: Counter[int] = Counter()  # answers by status of 400 and above
        self._running: set[TextRecord] = set()
        self._ended = _Sums()
        self.registry = CollectorRegistry(auto_describe=False)
        self._histograms = {
            name: Histogram(f"card_{name}", what, buckets=buckets, registry=self.registry)
            for name, (what, buckets) in HISTOGRAMS.items()
        }

    def begin(self, num_prompt_tokens: int, *, speculates: bool, is_first: bool = True) -> TextRecord:
        """Open the record of a text.

        Args:
            is_first: of the texts of its prompt, whose tokens count once.
        """
        record = TextRecord(self, RequestStats(num_prompt_tokens=num_prompt_tokens), speculates, is_first)
        self._running.add(record)
        return record

    def forget(self, record: TextRecord) -> None:
        """Remove the record of a text that was never written."""
        self._running.discard(record)

    def end(self, record: TextRecord) -> None:
        """Close the record of a text."""
        if record not in self._running:
            return
        self._running.discard(record)
        stats, now = record.stats, time.perf_counter()
        self._ended.add(record)
        self.finished[record.finish_reason] = self.finished.get(record.finish_reason, 0) + 1
        self.observe("e2e_request_latency_seconds", now - record.arrived_at)
        if record.is_first:
            self.observe("request_prompt_tokens", stats.num_prompt_tokens)
        self.observe("request_generation_tokens", stats.num_new_tokens)
        if record.started_at:
            self.observe("time_to_first_token_seconds", record.started_at - record.arrived_at)
            self.observe("request_queue_time_seconds", stats.queued_s)
            self.observe("request_prefill_time_seconds", stats.prefill_s)
            self.observe("request_decode_time_seconds", stats.decode_s)
            if stats.num_new_tokens > 1:
                self.observe("request_time_per_output_token_seconds", stats.decode_s / (stats.num_new_tokens - 1))

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of the histograms."""
        self._histograms[name].observe(value)

    def sums(self) -> _Sums:
        """Return the sums over all texts, running ones included."""
        total = deepcopy(self._ended)
        for record in self._running:
            total.add(record)
        return total


@dataclass(slots=True)
class _Sums:
    """Counters of `RequestStats`, added up."""

    values: Counter[str] = field(default_factory=Counter)
    accepted_per_depth: Counter[int] = field(default_factory=Counter)
    verified_by_writer: Counter[str] = field(default_factory=Counter)
    accepted_by_writer: Counter[str] = field(default_factory=Counter)

    def add(self, record: TextRecord) -> None:
        stats = record.stats
        names = [name for name in _SUMS if record.is_first or name not in _OF_PROMPTS]
        self.values.update({name: getattr(stats, name) for name in names})
        self.accepted_per_depth.update(dict(enumerate(stats.accepted_per_depth)))
        self.verified_by_writer.update(dict(stats.verified_by_writer))
        self.accepted_by_writer.update(dict(stats.accepted_by_writer))


def speculative_decoding(stats: RequestStats, most_candidates: int) -> dict[str, Any]:
    """Return the figures of speculation for one request, in vLLM's shape.

    Args:
        most_candidates: most candidates of one verification.
    """
    per_depth = stats.accepted_per_depth
    at_least = [stats.target_passes, *per_depth]
    histogram = [count - later for count, later in zip(at_least, [*per_depth, 0], strict=True)]
    num_spec_tokens = max(most_candidates, len(per_depth))
    histogram += [0] * (num_spec_tokens + 1 - len(histogram))
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.target_passes,
        "num_accepted_draft_tokens": stats.accepted_tokens,
        "num_draft_tokens": stats.verified_tokens,
        "num_spec_tokens": num_spec_tokens,
    }


def request_metrics(records: Sequence[TextRecord], most_candidates: int) -> dict[str, Any] | None:
    """Return the `metrics` of an answer; None for several texts, as they describe one."""
    if len(records) != 1:
        return None
    stats = records[0].stats
    return {
        "time_to_first_token_ms": 1e3 * stats.prefill_s,
        "generation_time_ms": 1e3 * stats.decode_s,
        "queue_time_ms": 1e3 * stats.queued_s,
        "tokens_per_second": stats.decode_tokens_per_s,
        "speculative_decoding": speculative_decoding(stats, most_candidates),
        "card": stats.as_dict(),
    }
