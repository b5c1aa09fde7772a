"""Recordings: they say what both models held likely, survive a file, and are refused when something is wrong."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import SamplingParams, SamplingRule
from card.errors import PlanError
from card.models.candidate_scorer import CandidateScorer
from card.tools.planner.recorder import record_texts
from card.tools.planner.recording import Recording, TargetText, load_recording, rows_of, save_recording
from card.tools.planner.synthetic import make_synthetic
from tests.examples import settings
from tests.tools.planner.making import toy_models, toy_recording


@pytest.mark.parametrize(("temperature", "coupled"), [(0.0, True), (1.0, True), (1.0, False)])
def test_scores_are_those_of_the_draft_model_run_alone(temperature, coupled):
    target, draft = toy_models()
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=70, top_p=0.95)
    answer = TargetText((1, 2, 3), tuple((5 * i) % 40 for i in range(70)), "length")
    (text,) = record_texts(target, draft, [answer], params.resolved(), coupled_noise=coupled)
    recording = _with_texts((text,))
    rows = rows_of(recording, text)
    scorer = CandidateScorer(SamplingRule.of(params.resolved()), draft.vocab_size, coupled=coupled)
    for place in range(len(answer.token_ids)):
        path = [*answer.prompt_ids, *answer.token_ids[:place]]
        ids, logprobs = map(np.array, scorer.top(draft.logits_after(path)[None], [len(path)], 40))
        num_possible = int((logprobs[0, :32] > -100).sum())  # those that are ruled out come in any order
        assert rows.draft_ids[place, :num_possible].tolist() == ids[0, :num_possible].tolist()
        assert rows.draft_logprobs[place].tolist() == pytest.approx(logprobs[0, :32].clip(min=-100).tolist())
        assert rows.target_ids[place].tolist() == np.argsort(-target.logits_after(path))[:8].tolist()


def test_a_recording_survives_a_file(tmp_path):
    recording = toy_recording()
    save_recording(recording, tmp_path / "a")
    assert load_recording(tmp_path / "a") == recording
    assert recording.agreement() == pytest.approx(0.8, abs=0.15)


def test_a_prompt_of_one_token_is_recorded(tmp_path):
    target, draft = toy_models()
    texts = record_texts(
        target, draft, [TargetText((7,), (1, 2), "stop")], SamplingParams(temperature=0.0, seed=0).resolved()
    )
    assert rows_of(_with_texts(texts), texts[0]).draft_ids.shape == (2, 32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "profile"}, "is no recording file: its kind is 'profile'"),
        ({"version": 2}, "version 2, this card reads version 1"),
        ({"texts": ()}, "no texts"),
        ({"num_candidates": 31}, "arrays of other sizes"),
        ({"vocab_size": 5}, "tokens that are not from 0 to 4"),
    ],
)
def test_a_broken_recording_is_refused(tmp_path, change, complaint):
    recording = msgspec.structs.replace(toy_recording(), **change)
    (tmp_path / "a").write_bytes(msgspec.msgpack.encode(recording))
    with pytest.raises(PlanError, match=complaint):
        load_recording(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"token_ids": ()}, "no tokens"),
        ({"draft_logprobs": b"\x00\x00\xc0\x7f" * (40 * 32)}, "no numbers"),
        ({"prompt_ids": ()}, "no prompt"),
    ],
)
def test_a_broken_text_is_refused(tmp_path, change, complaint):
    recording = toy_recording()
    first = msgspec.structs.replace(recording.texts[0], **change)
    with pytest.raises(PlanError, match=complaint):
        save_recording(_with_texts((first, *recording.texts[1:])), tmp_path / "a")


def test_a_prompt_that_comes_twice_is_refused(tmp_path):
    recording = toy_recording()
    with pytest.raises(PlanError, match="prompt of an earlier one"):
        save_recording(_with_texts((recording.texts[0], recording.texts[0])), tmp_path / "a")


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\x00 nonsense")
    with pytest.raises(PlanError, match="broken recording"):
        load_recording(tmp_path / "a")
    with pytest.raises(PlanError, match="cannot read"):
        load_recording(tmp_path / "b")


@given(agreement=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), seed=st.integers(0, 5))
@settings(max_examples=8, deadline=None)
def test_a_synthetic_recording_agrees_as_often_as_asked_for(agreement, seed):
    recording = make_synthetic(agreement, num_texts=8, num_tokens=100, seed=seed)
    assert recording.agreement() == pytest.approx(agreement, abs=0.06)
    for text in recording.texts:
        rows = rows_of(recording, text)
        assert (rows.draft_logprobs[:, 1:] <= rows.draft_logprobs[:, :-1]).all()
        assert (rows.draft_ids == np.array(text.token_ids)[:, None]).sum(axis=1).tolist() == [1] * 100


def test_a_synthetic_recording_is_refused_for_numbers_out_of_range():
    for agreement, num_tokens in ((-0.1, 10), (1.1, 10), (0.5, 1)):
        with pytest.raises(PlanError):
            make_synthetic(agreement, num_tokens=num_tokens)


def _with_texts(texts) -> Recording:
    return msgspec.structs.replace(toy_recording(), texts=texts)
