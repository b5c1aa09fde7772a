"""The answer of `/metrics` for Prometheus, under our names, and under vLLM's for existing dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from card.engine.metrics import READING_RATES, EngineStats
from card.errors import WorkerError
from card.server.metrics import COUNTERS, HISTOGRAMS
from card.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VLLM_NAMES = {  # ours, without prefix -> vLLM's; histograms have equal names
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage": ("kv_cache_usage_perc",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),  # both are counted in tokens
    "prompt_tokens_reused": ("prefix_cache_hits",),
    "generation_tokens": ("generation_tokens",),
    "requests_finished": ("request_success",),
    "verifications": ("spec_decode_num_drafts",),
    "candidates_verified": ("spec_decode_num_draft_tokens",),
    "candidates_accepted": ("spec_decode_num_accepted_tokens",),
    "candidates_accepted_per_position": ("spec_decode_num_accepted_tokens_per_pos",),
    **{name: (name,) for name in HISTOGRAMS},
}
_LABELLED = {  # counters, without prefix -> description, label
    "lookup_results": ("Whether the target's next token was a candidate already.", "result"),
    "fallbacks": ("Rounds decoded plainly, by cause.", "cause"),
    "candidates_accepted_per_position": ("Candidates accepted, by their depth from 0.", "position"),
    "candidates_verified_by_writer": ("Candidates verified, by the writer that proposed them.", "writer"),
    "candidates_accepted_by_writer": ("Candidates accepted, by the writer that proposed them.", "writer"),
    "requests_finished": ("Texts that ended, by reason.", "finished_reason"),
    "http_errors": ("Answers that were errors, by status.", "status"),
}


class Scrape:
    """Collects all metrics for one answer of `/metrics`; those of the engine are left out if it is down."""

    def __init__(self, service: Service) -> None:
        self._service, self._ledger = service, service.ledger
        self._labels = {"model_name": service.settings.served_model_names[0], "engine": "0"}

    def text(self) -> bytes:
        """Return the answer."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield each family under our name, and under vLLM's if there is one."""
        for family in self._families():
            yield _relabelled(family, family.name, self._labels)
            for alias in _VLLM_NAMES.get(family.name.removeprefix("card_"), ()):
                yield _relabelled(family, f"vllm:{alias}", self._labels)

    def _families(self) -> Iterator[Metric]:
        yield from self._from_engine()
        sums = self._ledger.sums()
        values = sums.values
        for name, (what, key) in COUNTERS.items():
            yield CounterMetricFamily(f"card_{name}", what, value=values[key])
        hits = {"hit": values["hits"], "late_hit": values["late_hits"]}
        counts: dict[str, Mapping[Any, float]] = {
            "lookup_results": {**hits, "miss": max(0.0, values["target_passes"] - sum(hits.values()))},
            "fallbacks": self._ledger.fallbacks,
            "candidates_accepted_per_position": sums.accepted_per_depth,
            "candidates_verified_by_writer": sums.verified_by_writer,
            "candidates_accepted_by_writer": sums.accepted_by_writer,
            "requests_finished": self._ledger.finished,
            "http_errors": self._ledger.errors,
        }
        for name, (what, label) in _LABELLED.items():
            family = CounterMetricFamily(f"card_{name}", what, labels=[label])
            for key, value in counts[name].items():
                family.add_metric([str(key)], value)
            yield family
        what = "Tokens of coming prompts, read while a client was busy with an answer."
        yield CounterMetricFamily("card_prompt_tokens_read_ahead", what, value=self._service.ahead.num_tokens)
        num_inside = self._service.gate.num_requests
        yield GaugeMetricFamily("card_requests_inside", "Requests that are being answered.", value=num_inside)
        yield from self._ledger.registry.collect()

    def _from_engine(self) -> Iterator[Metric]:
        try:
            stats = self._service.llm.stats()
        except WorkerError:
            yield GaugeMetricFamily("card_engine_up", "Whether the engine is alive.", value=0)
            return
        yield GaugeMetricFamily("card_engine_up", "Whether the engine is alive.", value=1)
        kv_bytes = self._service.llm.host.max_kv_bytes
        kv_share = stats.kv_used_bytes / kv_bytes if kv_bytes else 0.0
        busy_share = self._ledger.sums().values["drafter_busy_s"] / stats.round_s if stats.round_s else 0.0
        for name, what, value in (
            ("requests_running", "Texts in the batch.", stats.num_running),
            ("requests_waiting", "Texts that wait for a place in the batch.", stats.num_waiting),
            ("kv_cache_usage", "Share of the KV memory in use, kept prefixes included.", kv_share),
            ("drafter_lead", "Layers of candidates ahead of the text, mean of the running texts.", stats.drafter_lead),
            ("tree_nodes", "Candidates held for the running texts.", stats.tree_nodes),
            ("drafter_busy_share", "Drafting time over the time of rounds, since the start.", busy_share),
            ("speculating", "Whether the present schedule speculates.", stats.schedule != "off"),
        ):
            yield GaugeMetricFamily(f"card_{name}", what, value=float(value))
        if stats.drafter != "none":
            is_up = stats.drafter in ("up", "degraded")
            yield GaugeMetricFamily("card_drafter_up", "Whether the drafter drafts.", value=float(is_up))
        for name, what, value in (
            ("rounds", "Rounds of the engine.", stats.rounds),
            ("round_seconds", "Time of these rounds.", stats.round_s),
            ("target_tokens", "Rows that went through the target.", stats.target_tokens),
            ("drafter_restarts", "Times that the drafter was replaced.", stats.drafter_restarts),
            ("prefix_cache_queries", "Prompts looked up among kept prefixes.", stats.prefix_queries),
            ("prefix_cache_hits", "Of these, how many were found.", stats.prefix_hits),
            ("prefix_cache_read_tokens", "Tokens of prompts with KV from files.", stats.prefix_read_tokens),
        ):
            yield CounterMetricFamily(f"card_{name}", what, value=value)
        yield _reading_rates(stats)
        what = "Rounds of requests by writer and requests at once: it was asked, or why not."
        asked = CounterMetricFamily("card_writer_rounds", what, labels=["writer", "at_once", "result"])
        for labels, count in stats.asked_rounds.items():
            asked.add_metric(labels, count)
        yield asked


def _reading_rates(stats: EngineStats) -> Metric:
    """Return the histogram of how fast passes read prompts."""
    bounds = [*(str(float(rate)) for rate in READING_RATES), "+Inf"]
    buckets = list(zip(bounds, accumulate(stats.reading_rates), strict=True))
    what = "Rows a second of passes that read prompts, all rows of a pass together."
    return HistogramMetricFamily("card_prompt_pass_rows_per_second", what, buckets, stats.reading_rates_sum)


def _relabelled(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    """Return a family under another name, with more labels on its samples."""
    other = Metric(name, family.documentation, family.type)
    other.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name), labels={**labels, **sample.labels})
        for sample in family.samples
    ]
    return other
