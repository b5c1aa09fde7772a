"""The figures: their names, that they count what happened, and the published shape of those of one request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.engine.metrics import READING_RATES, EngineStats, RequestStats
from card.server.metrics import speculative_decoding
from card.tree.nodes import Nodes
from tests.server.running import PROMPT, Running, scraped, streams

pytestmark = pytest.mark.timeout(240)

OURS = [
    "card_lookup_results_total",
    "card_fallbacks_total",
    "card_drafter_lead",
    "card_drafter_busy_share",
    "card_drafter_busy_seconds_total",
    "card_target_stall_seconds_total",
    "card_tree_nodes",
    "card_drafter_up",
    "card_drafter_restarts_total",
    "card_engine_up",
    "card_requests_running",
    "card_candidates_accepted_total",
    "card_http_errors_total",
]
VLLMS = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
]


def test_dashboards_find_our_names_and_vllms(server: Running) -> None:
    server.complete(prompt=PROMPT, max_tokens=12, temperature=0)
    server.client.get("/nowhere")
    names = {name for name, _ in scraped(server)}
    assert set(OURS) <= names
    assert set(VLLMS) <= names


def test_the_counters_count_what_was_asked_and_written(server: Running) -> None:
    before = scraped(server)
    asked = {"prompt": PROMPT, "max_tokens": 7, "temperature": 0, "ignore_eos": True}
    num_prompt = server.complete(**asked)["usage"]["prompt_tokens"]
    streams(server.url, "/v1/completions", [{**asked, "n": 2}])
    server.complete(**asked, speculation="off")
    assert server.post("/v1/completions", {"prompt": 5}).status_code == 400
    after = scraped(server)

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - before.get((name, label), 0.0)

    assert grown("card_generation_tokens_total") == grown("vllm:generation_tokens_total") == 4 * 7
    assert grown("card_prompt_tokens_total") == 3 * num_prompt, "a prompt of two texts counts once"
    assert grown("card_requests_finished_total", "length") == grown("vllm:request_success_total", "length") == 4
    assert grown("vllm:e2e_request_latency_seconds_count") == 4
    assert grown("card_request_generation_tokens_sum") == 4 * 7
    assert grown("card_http_errors_total", "400") == 1
    assert grown("card_fallbacks_total", "request") == 6, "each token after the first had a round of its own"
    results = sum(grown("card_lookup_results_total", result) for result in ("hit", "late_hit", "miss"))
    assert results == grown("card_verifications_total") == grown("vllm:spec_decode_num_drafts_total")
    position = grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0")
    assert position <= grown("vllm:spec_decode_num_drafts_total")
    assert after["card_drafter_up", ""] in (0.0, 1.0)
    assert after["card_requests_inside", ""] == 0
    asked = {label: grown(name, label) for name, label in after if name == "card_writer_rounds_total"}
    assert asked["1 request beam"] == 6
    assert sum(count for label, count in asked.items() if label.endswith(" beam")) == results


def test_each_pass_that_reads_prompts_counts_with_the_rows_that_it_ran_a_second(server: Running) -> None:
    before = scraped(server)
    server.complete(prompt=PROMPT, max_tokens=7, temperature=0, ignore_eos=True)
    after, name = scraped(server), "card_prompt_pass_rows_per_second"
    assert after[f"{name}_count", ""] == before[f"{name}_count", ""] + 1, "the six passes of the answer are none"
    assert after[f"{name}_bucket", "+Inf"] == after[f"{name}_count", ""]
    assert after[f"{name}_sum", ""] > before[f"{name}_sum", ""]
    below = [after[f"{name}_bucket", f"{bound:.1f}"] for bound in READING_RATES]
    assert below == sorted(below), "a bucket holds those below it"


def test_the_rate_of_a_pass_is_in_the_first_bucket_that_is_not_below_it() -> None:
    stats = EngineStats()
    for num_rows, seconds in ((5, 1.0), (20, 1.0), (21, 1.0), (512, 0.01)):
        stats.count_reading(num_rows, seconds)
    assert stats.reading_rates == (1, 1, 1, *[0] * (len(READING_RATES) - 3), 1)
    assert stats.reading_rates_sum == 5 + 20 + 21 + 51200


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30), st.integers(1, 8))
def test_the_histogram_of_a_request_is_that_of_its_rounds(rounds: list[tuple[int, int]], most: int) -> None:
    stats = RequestStats()
    for num_offered, num_kept in rounds:
        size = max(num_offered, num_kept)
        chain = tuple(range(size))
        offer = Nodes.chain(chain, (0.0,) * size)
        stats.count_verification(offer, range(num_kept), ("beam",))
    told = speculative_decoding(stats, most)
    kept = [num_kept for _, num_kept in rounds]
    wanted = [kept.count(count) for count in range(max([most, *kept]) + 1)]
    assert told["acceptance_histogram"] == wanted
    assert told["num_spec_tokens"] == len(wanted) - 1
    assert told["num_accepted_draft_tokens"] == sum(kept)
    assert told["num_spec_steps"] == len(rounds)
    assert told["num_draft_tokens"] == sum(max(pair) for pair in rounds)
