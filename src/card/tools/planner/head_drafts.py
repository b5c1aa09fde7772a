"""Record the drafts of a trained head: it is asked after each token of the recorded texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from card.family.ctc.candidates import candidates_of
from card.family.ctc.slots import Slots, inputs_of
from card.models.features import FINAL, FeatureWish
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.tools.planner.recording import HeadRows, TargetText, pack_head

_HEAD_WISH = FeatureWish((FINAL,), "logits")
_HEAD_CANDIDATES = 64  # after each token


def record_head(path: str, target: RowRunner, answers: Sequence[TargetText]) -> list[HeadRows]:
    """Return a head's candidates after each token of the answers. Raises: ModelError if it is of another target."""
    head = Slots.load(path)
    head.attach(target, path)
    target.features.wish([_HEAD_WISH])
    try:
        return [pack_head(_behind_each(head, target, answer)) for answer in answers]
    finally:
        target.features.wish([])


def _behind_each(head: Slots, target: RowRunner, answer: TargetText) -> list[Any]:
    text, first = [*answer.prompt_ids, *answer.token_ids[:-1]], len(answer.prompt_ids) - 1
    slot = target.open(len(text))
    try:
        target.forward([Extension.of_text(slot, text, first_logits=first)])
        features = target.features.of(0, _HEAD_WISH)
    finally:
        target.close(slot)
    rows = inputs_of(features, target.embeddings(list(answer.token_ids)))  # [n, 2 * D]: a row and the token it gave
    size = head.facts.window
    padded = np.concatenate([np.zeros((size - 1, rows.shape[1]), np.float32), rows])
    windows = np.stack([padded[first : first + size] for first in range(len(rows))])  # [n, W, 2 * D]
    is_there = np.arange(size)[None] >= size - 1 - np.arange(len(rows))[:, None]
    return [candidates_of(head, one, _HEAD_CANDIDATES) for one in head.logprobs(windows, is_there)]
