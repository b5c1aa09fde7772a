"""Consumers of features see each row of a text once, as it is committed, and can do no harm."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.target import TargetWorker
from tests.decoding import PROMPT, fake, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings
from tests.unreliable_link import Faults
from tests.watching import Notes, TokenStates, watched


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    agreement=st.sampled_from([0.0, 0.7, 1.0]),
    verify=st.sampled_from(["chain", "tree"]),
    max_tokens=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    end_id=st.integers(0, 11),
    chunk=st.integers(1, 4),
)
def test_each_consumer_sees_the_rows_of_a_text_in_order_and_no_rejected_one(
    seed: int, agreement: float, verify: str, max_tokens: list[int], end_id: int, chunk: int
) -> None:
    target = toy_target(seed)
    notes = {rows: Notes(rows) for rows in ("all", "logits", "last")}  # type: ignore[arg-type]
    worker = TargetWorker(target, clock=time.perf_counter, watchers=watched(target, *notes.values()))
    engine = Engine(worker, fake(toy_draft(target, agreement), Faults()), limits=Limits(prefill_chunk=chunk))
    requests = [
        make_request(
            i,
            prompt=(i, *PROMPT),
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=count),
            draft=DraftSettings(verify=verify, budget=6, min_verify_prob=0.0),
            end_ids=frozenset({end_id}),
        )
        for i, count in enumerate(max_tokens)
    ]
    texts = run_all(engine, {2 * i: [one] for i, one in enumerate(requests)})
    for i, one in enumerate(requests):
        text = [*one.prompt_ids, *texts[i][0]]
        parts = {rows: [part for part in note.seen if part[0] == i] for rows, note in notes.items()}
        shown = [token for _, _, held in parts["all"] for token in held]
        assert len(shown) >= len(text) - 1, "the newest token may have no row"
        assert shown == text[: len(shown)]
        assert parts["all"][0][1] == 0, "they begin with the prompt's first row"
        from_last_of_prompt = [token for _, _, held in parts["logits"] for token in held]
        assert from_last_of_prompt == shown[len(one.prompt_ids) - 1 :]
        assert [held for _, _, held in parts["last"]] == [held[-1:] for _, _, held in parts["logits"]]


def test_rows_of_a_reused_prefix_are_not_shown_again() -> None:
    target, notes = toy_target(), Notes("all")
    engine = Engine(TargetWorker(target, clock=time.perf_counter, watchers=watched(target, notes)), None)
    for i in range(2):
        run_all(engine, {0: [make_request(i, prompt=3 * PROMPT, uses_drafter=False)]})
    assert next(first for request_id, first, _ in notes.seen if request_id == 1) == 3 * len(PROMPT) - 1
    assert notes.has_drafter == {False}


def test_all_wishes_are_told_to_the_model_at_once() -> None:
    one, other = Notes("all"), Notes("last")
    source = TokenStates(toy_target())
    type(watched(toy_target()))(source, [one, other])
    assert source.wishes == [one.wish, other.wish]


@pytest.mark.parametrize("told", [1.5, float("nan"), "a bug"])
def test_a_consumer_that_fails_is_heard_no_longer_and_costs_no_request_a_token(
    told: object, caplog: pytest.LogCaptureFixture
) -> None:
    turns = iter([None, None, None, told, None])

    def answer() -> float | None:
        said = next(turns)
        if isinstance(said, str):
            raise RuntimeError(said)
        return said  # type: ignore[return-value]

    target = toy_target()
    failing, other = Notes("last", answer), Notes("last")
    worker = TargetWorker(target, clock=time.perf_counter, watchers=watched(target, failing, other))
    engine = Engine(worker, fake(toy_draft(target, 0.7)))
    with caplog.at_level(logging.WARNING):
        texts = run_all(engine, {0: [make_request(7), make_request(8)]})
    assert texts[7] == texts[8] == plain(toy_target())
    assert len(failing.seen) == 4 < len(other.seen)
    assert [record.message for record in caplog.records if "not called again" in record.message]
