"""Recordings and mined mismatches of models that keep records of their rows."""

from __future__ import annotations

import pytest

from card.config import SamplingParams
from card.family.judges.mining import Miner, Mismatches
from card.kernels.int8_linear import why_not_int8
from card.tools.planner.recorder import record_texts
from card.tools.planner.recording import TargetText
from tests.models.test_recording_engine import KINDS, TEXT, each_model

pytestmark = pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here")


@each_model
def test_recordings_and_mined_mismatches_are_those_of_runners_with_room_for_all(kind: str) -> None:
    """Both ask for logits of many rows behind kept ones, longer than the room for records."""
    answers = [TargetText(tuple(TEXT[:30]), tuple(TEXT[30:140]), "length")]
    params, found = SamplingParams(temperature=0.0, seed=0).resolved(), []
    for room in (4, 256):
        target, draft = (KINDS[kind].make_runner(noise, max_tree_rows=room) for noise in (0.0, 0.1))
        recorded = record_texts(target, draft, answers, params, coupled_noise=False)
        miner = Miner(target, draft, answer_of=lambda _, answer: tuple(answer), max_tokens=60, end_ids=frozenset())
        mined = Mismatches.joined(miner.mine([(0, TEXT[:30])]))
        assert len(mined) > 1
        found.append((recorded, mined.features.numpy().tobytes(), mined.is_important.tolist()))
    assert found[0] == found[1]
