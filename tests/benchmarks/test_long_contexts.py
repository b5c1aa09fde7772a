"""The script of long contexts: bytes of a token follow from counts, and the page's table from the lines."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_results import RESULTS, lines_of, rows_of

LINE = {
    "target": "a.gguf",
    "length": 100,
    "method": "sparsespec",
    "at_once": 1,
    "weight_bytes": 4_000_000,
    "row_bytes": 10_000,
    "num_prompt_tokens": 95,
    "num_new_tokens": 11,
    "target_passes": 4,
    "self_draft_passes": 6,
    "verified_tokens": 8,
    "accepted_tokens": 6,
    "draft_kv_bytes": 1_000_000,
    "verify_kv_bytes": 4_000_000,
}


def test_a_batch_shares_the_weights_of_every_pass_and_no_rows(bench):
    megabytes = bench["long_contexts"].megabytes_a_token
    plain = bench["long_contexts"].plain_line(LINE)
    assert (megabytes(LINE, 1), megabytes(plain, 1)) == pytest.approx((10 * 4.0 / 10 + 0.5, 4.0 + 1.0))
    assert (megabytes(LINE, 4), megabytes(plain, 4)) == pytest.approx((10 * 1.0 / 10 + 0.5, 1.0 + 1.0))


def test_a_batch_that_ran_read_the_weights_once_in_each_of_its_rounds(bench):
    many = {**LINE, "target": "elsewhere/a.gguf", "at_once": 4, "num_new_tokens": 44, "rounds": 20}
    assert bench["long_contexts"].megabytes_a_token(many, 4) == pytest.approx(20 * 4.0 / 40 + 5.0 / 40)
    plain, row = bench["long_contexts"].rows_of([LINE, many])
    assert plain[4:7] == ["≈ 5 MB", "≈ 2 MB", "≈ 1 MB"] and row[5] == "2 MB, 0.94" and row[6].startswith("≈ ")


def test_a_method_without_drafts_of_its_own_reads_all_rows_in_each_of_its_passes(bench):
    copied = {**LINE, "self_draft_passes": 0, "draft_kv_bytes": 0, "verify_kv_bytes": 0}
    assert bench["long_contexts"].megabytes_a_token(copied, 1) == pytest.approx(4 * (4.0 + 1.0) / 10)


def test_speeds_are_those_of_all_requests_together_where_they_were_timed(bench):
    timed = {**LINE, "decode_s": 2.0}
    many = {**timed, "at_once": 4, "num_new_tokens": 44, "rounds": 20}
    assert bench["long_contexts"].rows_of([many, timed])[1][-1] == "5.0, 20.0"
    assert bench["long_contexts"].rows_of([LINE])[1][-1] == "–"


def test_a_table_without_runs_of_one_request_is_computed_from_the_fewest_at_once(bench):
    counts = {"num_prompt_tokens": 4 * 95, "num_new_tokens": 44, "target_passes": 16, "self_draft_passes": 24}
    bytes_of_rows = {"draft_kv_bytes": 4_000_000, "verify_kv_bytes": 16_000_000}
    many = {**LINE, **counts, **bytes_of_rows, "at_once": 4, "rounds": 12}
    alone, (plain, row) = (bench["long_contexts"].rows_of(lines) for lines in ([LINE], [many]))
    assert [plain, row[:4]] == [alone[0], alone[1][:4]]
    assert row[4:7] == [f"≈ {alone[1][4]}", "2 MB, 1.18", alone[1][6]]


def test_the_table_of_long_contexts_is_that_of_its_lines(bench):
    heading = (
        "| target, context | method | accepted | tokens a full pass | 1 at once | 4 at once | 16 at once | tokens/s |"
    )
    told = rows_of("src/card/family/self_drafting/README.md", heading)
    rows = bench["long_contexts"].rows_of(lines_of(RESULTS / "long_contexts.jsonl"))
    assert told == [[cell.strip(" *`") for cell in row] for row in rows] and len(told) > 3
