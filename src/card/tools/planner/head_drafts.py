"""Record the drafts of a trained head: it is asked after each token of the recorded texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from card.family.ctc.candidates import candidates_of
from card.family.ctc.head import SlotHead
from card.family.learning.bound_module import inputs_of
from card.models.features import FINAL, FeatureWish
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.theirs.transformers.arrays import as_tensor
from card.tools.planner.recording import HeadRows, TargetText, pack_head

_HEAD_WISH = FeatureWish((FINAL,), "logits")
_HEAD_CANDIDATES = 64  # after each token


def record_head(path: str, target: RowRunner, answers: Sequence[TargetText]) -> list[HeadRows]:
    """Return a head's candidates after each token of the answers. Raises: ModelError if it is of another target."""
    head = SlotHead.load(path)
    head.attach(target, path)
    target.features.wish([_HEAD_WISH])
    try:
        return [pack_head(_behind_each(head, target, answer)) for answer in answers]
    finally:
        target.features.wish([])


def _behind_each(head: SlotHead, target: RowRunner, answer: TargetText) -> list[Any]:
    text, first = [*answer.prompt_ids, *answer.token_ids[:-1]], len(answer.prompt_ids) - 1
    slot = target.open(len(text))
    try:
        target.forward([Extension.of_text(slot, text, first_logits=first)])
        features = target.features.of(0, _HEAD_WISH)
    finally:
        target.close(slot)
    rows = inputs_of(
        as_tensor(features), as_tensor(target.embeddings(list(answer.token_ids)))
    )  # [n, 2 * D]: a row and the token it gave
    size = head.facts.window
    padded = torch.cat((torch.zeros(size - 1, rows.shape[1]), rows))
    windows = padded.unfold(0, size, 1).transpose(1, 2)  # [n, W, 2 * D]
    is_there = torch.arange(size)[None] >= size - 1 - torch.arange(len(rows))[:, None]
    with torch.inference_mode():
        logprobs = head.logprobs(head(windows, is_there))
    return [candidates_of(head, one, _HEAD_CANDIDATES) for one in logprobs]
