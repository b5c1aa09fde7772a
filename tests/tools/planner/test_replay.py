"""Replayed models: on the recorded way they say what was recorded; off it they are a model like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.config import SamplingParams, SamplingRule
from card.errors import CapacityError, PlanError
from card.models.candidate_scorer import CandidateScorer
from card.models.protocol import NO_PARENT, Extension
from card.tools.planner.recorder import record_texts
from card.tools.planner.recording import Recording, TargetText, rows_of
from card.tools.planner.replay import ReplayedModel, Role
from card.tools.planner.replayed_texts import ReplayedTexts
from card.tree.logits import top
from tests.tools.planner.making import toy_models, toy_recording

GREEDY = SamplingRule(0.0, 0, 1.0, 0.0, 0)
RECORDING = toy_recording()
TEXTS = ReplayedTexts(RECORDING)


def model_of(role: Role, texts: ReplayedTexts = TEXTS, passes: list | None = None) -> ReplayedModel:
    seen = [] if passes is None else passes
    return ReplayedModel(
        texts, role, max_model_len=256, num_tree_rows=64, on_pass=seen.append, on_keep=lambda _: seen.append("keep")
    )


def run_path(model: ReplayedModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits after a path, run alone."""
    slot = model.open()
    (logits,) = model.forward([Extension(slot, tokens, range(-1, len(tokens) - 1), len(tokens) - 1)])
    model.close(slot)
    return logits[0]


@pytest.mark.parametrize("recording", [RECORDING, toy_recording(temperature=1.0)], ids=["greedy", "sampled"])
def test_the_target_chooses_the_recorded_tokens_and_shows_its_likeliest(recording: Recording):
    texts = ReplayedTexts(recording)
    model = model_of("target", texts)
    for text, prompt, answer in zip(recording.texts, texts.prompts, texts.answers, strict=True):
        path = [*prompt, *answer]
        slot = model.open()
        (logits,) = model.forward([Extension(slot, path, range(-1, len(path) - 1), len(prompt) - 1)])
        assert logits[:-1].argmax(-1).tolist() == list(answer)
        shown = texts.original_ids[top(logits[:-1], 8)[0]]
        for ours, recorded, token in zip(shown, rows_of(recording, text).target_ids, text.token_ids, strict=True):
            others = [i for i in recorded.tolist() if i != token]
            assert ours.tolist() == [token, *others][:8]


@pytest.mark.parametrize("recording", [RECORDING, toy_recording(temperature=1.0)], ids=["greedy", "sampled"])
def test_the_draft_model_gives_the_candidates_their_recorded_scores(recording: Recording):
    texts = ReplayedTexts(recording, 8)
    model, scorer = model_of("draft", texts), CandidateScorer(GREEDY, texts.vocab_size, coupled=True)
    for text, prompt, answer in zip(recording.texts, texts.prompts, texts.answers, strict=True):
        rows = rows_of(recording, text)
        path = [*prompt, *answer[:-1]]
        (logits,) = model.forward([Extension(model.open(), path, range(-1, len(path) - 1), len(prompt) - 1)])
        ids, logprobs = scorer.top(logits, range(len(prompt), len(path) + 1), 8)
        assert (texts.original_ids[np.array(ids)] == rows.draft_ids[:, :8]).all()
        np.testing.assert_allclose(logprobs, rows.draft_logprobs[:, :8], atol=1e-4)


@given(data=st.data())
def test_a_tree_is_run_as_each_of_its_paths_alone(data):
    model = model_of(data.draw(st.sampled_from(("target", "draft"))))
    prompt = list(TEXTS.prompts[data.draw(st.integers(0, 2))])
    size = data.draw(st.integers(1, 12))
    tokens = data.draw(st.lists(st.integers(0, TEXTS.vocab_size - 1), min_size=size, max_size=size))
    parents = [data.draw(st.integers(-1, idx - 1)) for idx in range(size)]
    slot = model.open()
    model.forward([Extension(slot, prompt, range(-1, len(prompt) - 1), len(prompt))])
    rows = [len(prompt) + parent if parent >= 0 else len(prompt) - 1 for parent in parents]
    (logits,) = model.forward([Extension(slot, tokens, rows)])
    paths: list[list[int]] = []
    for token, parent, found in zip(tokens, parents, logits, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else prompt), token])
        torch.testing.assert_close(found, run_path(model, paths[-1]))


def test_kept_rows_go_on_where_they_stood():
    model = model_of("target")
    path = [*TEXTS.prompts[0], *TEXTS.answers[0][:4]]
    slot, start = model.open(), len(TEXTS.prompts[0])
    tree = [*path[start:], 1]
    model.forward([Extension(slot, path[:start], range(-1, start - 1), start)])
    model.forward([Extension(slot, [1, *tree], [start - 1, start - 1, start + 1, start + 2, start + 3, start + 1])])
    model.keep(slot, start, [start + 1, start + 2, start + 3, start + 4])
    assert model.num_rows(slot) == len(path)
    copy = model.open()
    model.copy_rows(slot, copy, len(path))
    for one in (slot, copy):
        (logits,) = model.forward([Extension(one, [TEXTS.answers[0][4]], [len(path) - 1])])
        torch.testing.assert_close(logits[0], run_path(model, [*path, TEXTS.answers[0][4]]))


def test_off_the_text_the_same_token_is_followed_by_what_followed_it_before():
    answer, prompt = TEXTS.answers[0], TEXTS.prompts[0]
    last_places = {token: place for place, token in enumerate(answer[:20])}
    token, place = next((t, p) for t, p in last_places.items() if t != answer[20])
    wrong = [*prompt, *answer[:20], token]
    assert int(run_path(model_of("target"), wrong).argmax()) == answer[place + 1]


def test_what_is_said_off_the_text_does_not_depend_on_what_was_replayed_before():
    (prompt, *_), fresh, used = TEXTS.prompts, ReplayedTexts(RECORDING), ReplayedTexts(RECORDING)
    start = used.follow(0, prompt)
    for token in range(used.vocab_size):  # other ways come first
        used.follow(start, (token, token, token))
    paths = [(a, b) for a in range(0, fresh.vocab_size, 3) for b in range(0, fresh.vocab_size, 5)]
    found = [[one.row_of(one.follow(0, (*prompt, *path))) for path in reversed(paths)] for one in (fresh, used)]
    assert found[0] == found[1]


def test_passes_tell_their_size():
    seen: list = []
    model = model_of("draft", passes=seen)
    one, other = model.open(), model.open()
    model.forward([Extension(one, [1, 2, 3], [NO_PARENT, 0, 1], 2)])
    model.forward([Extension(one, [4], [2]), Extension(other, [1, 2], [NO_PARENT, 0], 0)])
    model.keep(one, 1, [2])
    sizes = [(s.num_tokens, s.num_sequences, s.num_context_rows, s.num_logits) for s in seen[:2]]
    assert sizes == [(3, 1, 0, 1), (3, 2, 3, 3)]
    assert seen[2:] == ["keep"]


def test_a_full_sequence_refuses_more_and_stays_as_it_was():
    model = model_of("draft")
    slot = model.open(2)
    model.forward([Extension(slot, [1, 2], [NO_PARENT, 0])])
    with pytest.raises(CapacityError):
        model.forward([Extension(slot, [3], [1])])
    assert model.num_rows(slot) == 2
    with pytest.raises(CapacityError):
        model.open(1000)


def test_more_candidates_than_recorded_are_refused():
    with pytest.raises(PlanError, match="holds 32 candidates"):
        ReplayedTexts(RECORDING, 33)


def test_two_answers_to_the_same_tokens_are_refused():
    target, draft = toy_models()
    params = SamplingParams(temperature=0.0, seed=0)
    answers = [TargetText((1, 2), (3, 4, 5), "length"), TargetText((1, 2, 3), (6, 7), "length")]
    texts = record_texts(target, draft, answers, params.resolved())
    changed = {name: getattr(RECORDING, name) for name in RECORDING.__struct_fields__} | {"texts": texts}
    with pytest.raises(PlanError, match="continues differently"):
        ReplayedTexts(Recording(**changed))
