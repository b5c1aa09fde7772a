"""Every method on models with records, or with states, writes what transformers writes, and rejects for free."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from card.config import DraftSettings, SamplingParams
from card.config.selection import SelfDrafting, parse_selection
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.engine.target import TargetWorker
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.protocol import Extension
from card.models.rows.row_store import RowStore
from tests.decoding import decode, inline, make_request, run_all
from tests.models import test_records, test_states

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
KINDS = {"short convolutions": test_records, "the delta rule": test_states}
TEXT = test_records.TEXT
each_model = pytest.mark.parametrize("kind", KINDS)
TREES = DraftSettings(
    verify="tree",
    beam_width=4,
    branch=3,
    budget=8,
    lead=8,
    num_speculative_tokens=6,
    min_verify_prob=0.0,
    min_path_logprob=-1e9,
)


@functools.cache
def expected(kind: str, length: int, num_new: int) -> list[int]:
    model, ids = copy.deepcopy(KINDS[kind].model_of()), torch.tensor([TEXT[:length]])
    options = {"do_sample": False, "max_new_tokens": num_new, "eos_token_id": None}
    written: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()
    return written


def engine_of(kind: str, method: str, *, num_rows: int | None = None, store: RowStore | None = None) -> Engine:
    runner = KINDS[kind].make_runner(max_tree_rows=80)
    drafting = SelfDrafting(parse_selection("sparse:0.1:12")) if method == "self-drafting" else None
    num_bytes = None if num_rows is None else num_rows * runner.row_bytes + runner.state_bytes
    worker = TargetWorker(
        runner, clock=time.perf_counter, self_drafting=drafting, max_kv_bytes=num_bytes, row_store=store
    )
    link = inline(KINDS[kind].make_runner(0.1, max_tree_rows=80)) if method in ("card", "sps") else None
    return Engine(worker, link, limits=Limits(prefill_chunk=40))


@each_model
@pytest.mark.parametrize("method", ["vanilla", "sps", "card", "self-drafting"])
def test_every_method_writes_what_transformers_writes(kind: str, method: str) -> None:
    engine, lengths = engine_of(kind, method), (5, 33, 90)
    shape = {"method": "card" if method == "self-drafting" else method, "uses_drafter": method in ("card", "sps")}
    draft = TREES if method != "self-drafting" else DraftSettings(verify="chain", num_speculative_tokens=6, budget=6)
    requests = [
        make_request(
            i, prompt=tuple(TEXT[:n]), params=SamplingParams(temperature=0.0, max_tokens=40), draft=draft, **shape
        )
        for i, n in enumerate(lengths)
    ]
    texts = run_all(engine, {0: requests})
    assert [texts[i][0] for i in range(len(lengths))] == [expected(kind, n, 40) for n in lengths]


@each_model
def test_trees_of_candidates_are_verified_in_one_pass_a_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, forked, num_passes = KINDS[kind].make_runner(max_tree_rows=80), 0, 0
    forward = runner.forward

    def watching(extensions: Sequence[Extension]) -> list[Floats]:
        nonlocal forked, num_passes
        forked += any(len(set(one.parents)) < len(one.parents) for one in extensions)
        num_passes += 1
        return forward(extensions)

    monkeypatch.setattr(runner, "forward", watching)
    link = inline(KINDS[kind].make_runner(0.1, max_tree_rows=80))
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts, _, stats = decode(runner, link, prompt=tuple(TEXT[:20]), method="card", params=params, draft=TREES)
    assert texts == expected(kind, 20, 40)
    assert forked > 0 and stats.accepted_tokens > 0
    assert num_passes == 1 + stats.target_passes  # none after a rejection


@each_model
def test_a_request_whose_rows_wait_in_a_file_goes_on_as_if_nothing_had_happened(kind: str, tmp_path: object) -> None:
    store = RowStore(str(tmp_path), 1 << 24)
    engine = engine_of(kind, "vanilla", num_rows=200, store=store)
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (60, 8)]
    first, second = (
        make_request(i, prompt=tuple(TEXT[: 90 + i]), params=one, method="vanilla", uses_drafter=False)
        for i, one in enumerate(params)
    )
    texts = run_all(engine, {0: [first], 12: [second]})
    assert texts[0][0] == expected(kind, 90, 60)
    assert texts[1][0] == expected(kind, 91, 8)


@each_model
def test_turns_that_share_a_beginning_write_what_transformers_writes(kind: str) -> None:
    """The first prompt ends at a landmark, the second one goes on with it, the third one has only its beginning."""
    engine = engine_of(kind, "vanilla")
    for i, length in enumerate((33, 90, 40)):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        request = make_request(i, prompt=tuple(TEXT[:length]), params=params, method="vanilla", uses_drafter=False)
        assert run_all(engine, {0: [request]})[i][0] == expected(kind, length, 8)
    assert engine.stats().prefix_hits == 2


@each_model
def test_scores_behind_a_kept_beginning_are_those_of_the_whole_text(kind: str) -> None:
    """A part of a text whose logits are all asked for may be longer than the room for records."""
    runner, whole = (KINDS[kind].make_runner(max_tree_rows=room) for room in (12, 256))
    slot, other = runner.open(), whole.open()
    (expected_logits,) = whole.forward([Extension.of_text(other, TEXT, first_logits=0)])
    runner.forward([Extension.of_text(slot, TEXT[:30])])
    runner.keep(slot, 29)
    again = runner.open()
    runner.copy_rows(slot, again, 29)
    for first in range(29, 150, 40):
        part = TEXT[: first + 40]
        (logits,) = runner.forward([Extension.of_text(again, part, first, first_logits=first)])
        assert np.array_equal(logits, expected_logits[first : first + 40])
