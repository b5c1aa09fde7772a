"""A target that drafts for itself writes the text of plain decoding, and its requests verify in turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from card import LLM
from card.config import DraftSettings, SamplingParams
from card.engine.queue import Limits
from card.engine.request import Request
from card.errors import ModelError, SettingsError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.decoding import decode, make_engine, make_request, plain, run_all, toy_target
from tests.pair import Pair
from tests.reaching_in import kv_of, open_slots
from tests.tiny import tiny_llama
from tests.toy import TableModel

pytestmark = pytest.mark.timeout(240)  # machine code may have to be made first
LENGTH = 4
PROMPT = "the cat sat on the mat and the dog sat on the log, and then the cat sat on the dog"
DRAFT = DraftSettings(num_speculative_tokens=LENGTH)
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=18 + i, top_p=0.9) for i in range(8)]


def runner_of(kind: str) -> RowRunner:
    model = tiny_llama(61, max_position_embeddings=128)
    if kind == "int8":
        if (reason := why_not_int8()) is not None:
            pytest.skip(f"no integer passes: {reason}")
        model.computes_int8 = True
    return plain_runner(model, max_model_len=100, own_pass=kind != "transformers")


def requests(method: str) -> list[Request]:
    prompts = [tuple((7 * j * j + i) % 61 for j in range(9 + 3 * i)) for i in range(8)]
    return [
        make_request(i, method=method, params=params, draft=DRAFT, prompt=prompt, uses_drafter=False)
        for i, (params, prompt) in enumerate(zip(PARAMS, prompts, strict=True))
    ]


@pytest.mark.parametrize("method", ["sparsespec", "specpv"])
@pytest.mark.parametrize(("kind", "num_at_once"), [("own pass", 1), ("own pass", 8), ("transformers", 8), ("int8", 8)])
def test_text_is_that_of_plain_decoding_alone_and_in_batches(kind: str, num_at_once: int, method: str) -> None:
    limits = Limits(max_num_seqs=num_at_once, prefill_chunk=5)
    wanted = run_all(make_engine(runner_of(kind), None, "vanilla", limits=limits), {0: requests("vanilla")})
    runner = runner_of(kind)
    engine = make_engine(runner, None, method, limits=limits)
    arrivals = {round_idx: [one] for round_idx, one in enumerate(requests(method))}
    assert run_all(engine, arrivals) == wanted


def test_rows_that_drafting_wrote_are_replaced_by_those_of_the_verification() -> None:
    prompt = tuple(range(20))
    rows = []
    for method in ("vanilla", "sparsespec"):
        runner = runner_of("own pass")
        request = make_request(0, method=method, params=PARAMS[0], draft=DRAFT, prompt=prompt, uses_drafter=False)
        texts = run_all(make_engine(runner, None, method), {0: [request]})
        rows.append(kv_of(runner, open_slots(runner)[-1], len(prompt) + len(texts[0][0]) - 1))
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-4, rtol=1e-4)


def test_drafts_read_few_rows_and_verifications_all() -> None:
    runner = runner_of("own pass")
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40)
    prompt = tuple((7 * j * j) % 61 for j in range(50))
    _, _, stats = decode(runner, None, method="sparsespec", params=params, prompt=prompt, draft=DRAFT)
    assert stats.self_draft_passes > 0 and stats.accepted_by_writer.get("self", 0) == stats.accepted_tokens
    assert stats.verified_tokens == stats.self_draft_passes, "what was drafted was verified"
    most_newest = 2 * (LENGTH + 1)
    assert stats.draft_kv_bytes <= stats.self_draft_passes * most_newest * runner.row_bytes
    assert stats.verify_kv_bytes >= stats.target_passes * len(prompt) * runner.row_bytes


def test_a_target_that_reads_all_that_matters_accepts_all_it_drafts() -> None:
    target = toy_target()
    target.__class__ = _Perfect
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=61)
    _, _, stats = decode(target, None, method="sparsespec", params=params, draft=DRAFT)
    assert stats.accepted_tokens == stats.verified_tokens > 0
    assert stats.target_passes == pytest.approx(60 / (LENGTH + 1), abs=1)


class _Perfect(TableModel):
    def _with_few_rows(self) -> TableModel:
        return self


class _Failing(TableModel):
    """Fails in every pass that reads chosen rows."""

    def forward(self, extensions: Sequence[Extension]) -> list[Floats]:
        if any(one.reads is not None for one in extensions):
            raise ModelError("few rows are too few")
        return super().forward(extensions)


def test_a_request_whose_drafting_passes_fail_goes_on_plainly_and_no_other_notices() -> None:
    target = toy_target()
    target.__class__ = _Failing
    token_ids, reason, stats = decode(target, None, method="sparsespec")
    assert (token_ids, reason) == plain(toy_target())
    assert stats.accepted_tokens == 0


def test_what_passes_a_partial_verification_is_a_draft_of_several_tokens_a_pass() -> None:
    target = toy_target()
    target.__class__ = _Perfect
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=100)  # greedy text over few tokens runs in a circle
    token_ids, reason, stats = decode(target, None, method="specpv", params=params, draft=DraftSettings(lead=12))
    assert (token_ids, reason) == plain(toy_target(), params=params)
    assert stats.accepted_tokens == stats.verified_tokens > 1.5 * stats.self_draft_passes
    assert stats.mean_acceptance_length > 8


def test_rows_of_candidates_that_a_partial_verification_rejects_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=100)
    _, _, stats = decode(toy_target(), None, method="specpv", params=params, draft=DraftSettings(lead=12))
    assert stats.accepted_tokens > 0
    assert not caplog.records, "or the next pass would not be a chain, and would fail"


def test_the_judge_partial_keeps_what_passed_and_every_result_says_that_it_is_not_exact(pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    settings = {"method": "specpv", "dtype": "float32", "kv_selection": "sparse:0:14", "lead": 6}
    with LLM(pair.target, **settings) as exact, LLM(pair.target, **settings, judge="partial") as lenient:
        ours, theirs = (one.generate(PROMPT, params)[0] for one in (exact, lenient))
    assert ours.exact and not theirs.exact and not theirs.stats.is_exact
    assert theirs.stats.accepted_tokens == theirs.stats.verified_tokens > 0, "what passed is never revoked"
    assert 0 < theirs.stats.lenient_tokens <= theirs.stats.accepted_tokens
    assert ours.stats.lenient_tokens == 0


def test_an_aborted_request_leaves_its_draft_behind() -> None:
    engine = make_engine(toy_target(), None, "sparsespec")
    one, other = (make_request(i, method="sparsespec", draft=DRAFT, uses_drafter=False) for i in range(2))
    for request in (one, other):
        engine.add(engine.check(request))
    for _ in range(4):
        engine.step()
    assert engine.abort(0) is not None
    while engine.has_work:
        engine.step()
    assert engine.stats().kv_open_sequences == 0


def test_a_request_that_wants_no_speculation_drafts_nothing() -> None:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=30, speculates=False)
    token_ids, reason, stats = decode(toy_target(), None, method="sparsespec", params=params, draft=DRAFT)
    assert (token_ids, reason) == plain(toy_target(), params=params)
    assert stats.self_draft_passes == 0


def test_eight_requests_verify_in_turns() -> None:
    target = toy_target()
    target.__class__ = _Perfect
    engine = make_engine(target, None, "sparsespec", limits=Limits(max_num_seqs=8, prefill_chunk=64))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=90)
    for i in range(8):
        request = make_request(
            i, method="sparsespec", params=params, draft=DraftSettings(num_speculative_tokens=7), uses_drafter=False
        )
        engine.add(engine.check(request))
    verified = [len(engine.step()) for _ in range(60)]
    assert set(verified[10:]) == {1}, "one of eight in each round"


def test_a_wrong_selection_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SettingsError, match="must be one of sparse, vegas"):
        LLM("/nowhere", method="sparsespec", kv_selection="best")
