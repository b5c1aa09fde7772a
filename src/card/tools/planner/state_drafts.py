"""Record the drafts of blocks and heads: behind the text, and deeper, behind their own candidates.

A deeper row reads the drafter's own state, so it is wrong more often. Chains of the text's own tokens begin behind each
position and show how often.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from card.errors import PlanError
from card.kernels.number_types import Floats
from card.models.features import FeatureWish
from card.models.own.eagle_head import HeadInputs
from card.models.own.row_inputs import RowInputs
from card.models.protocol import Extension, LanguageModel
from card.models.runner import RowRunner
from card.tools.planner.recording import TargetText
from card.tree.logits import FloatArray, as_array

NUM_DEEPER = 4  # layers of a chain behind its first: longer chains count as the last
CHUNK = 64  # positions, or chains, whose logits are in memory at once


def inputs_of(draft: LanguageModel, target: LanguageModel, answer: TargetText) -> Floats | None:
    """Return the inputs of a block's or head's rows of a text, made of the target's states; None for another draft.

    Raises: PlanError for a prompt of one token where the first token has no row.
    """
    makes = draft.block_inputs if isinstance(draft, RowRunner) else None
    if makes is None:
        return None
    assert isinstance(target, RowRunner)
    text, first = [*answer.prompt_ids, *answer.token_ids[:-1]], makes.first_place
    if len(answer.prompt_ids) <= first:
        raise PlanError("a head drafts nothing behind a prompt of one token: leave that prompt out")
    wish, slot = FeatureWish(makes.target_layers, "all"), target.open(len(text))
    target.features.wish([wish])
    try:
        target.forward([Extension.of_text(slot, text)])
        fused = makes.fused(target.features.of(0, wish))
    finally:
        target.features.wish([])
        target.close(slot)
    states = np.concatenate([np.zeros((1, makes.width), np.float32), fused[:-1]])
    return makes.rows(text[first:], states[first:])


def deeper_logits(
    draft: LanguageModel, answer: TargetText, inputs: Floats | None
) -> Iterator[tuple[int, range, FloatArray]]:
    """Yield what chains of the text's tokens say in each deeper layer: its depth from 1 on, the places in the answer
    that it predicts, and [n, V] logits.

    Args:
        inputs: of the text's rows, as of `inputs_of`.
    """
    makes = draft.block_inputs if isinstance(draft, RowRunner) else None
    if makes is None or inputs is None or (isinstance(makes, HeadInputs) and makes.num_tokens > 1):
        return
    assert isinstance(draft, RowRunner)
    wish = FeatureWish((makes.own_state,), "logits")
    draft.features.wish([wish])
    try:
        for begin in range(0, len(answer.token_ids) - 1, CHUNK):
            yield from _chains(draft, makes, wish, answer, inputs, begin)
    finally:
        draft.features.wish([])


def _chains(
    draft: RowRunner, makes: RowInputs, wish: FeatureWish, answer: TargetText, inputs: Floats, begin: int
) -> Iterator[tuple[int, range, FloatArray]]:
    """Yield the layers of the chains that begin at some places of the answer."""
    text, ids = [*answer.prompt_ids, *answer.token_ids][makes.first_place :], answer.token_ids
    end = min(begin + CHUNK, len(ids) - 1)
    first = len(inputs) - len(ids) + begin  # the text's row behind which the first chain begins
    rows = range(first, first + end - begin)
    slot = draft.open(rows.stop + NUM_DEEPER * len(rows))
    try:
        read = Extension(slot, text[: rows.stop], range(-1, rows.stop - 1), rows.start, inputs=inputs[: rows.stop])
        draft.forward([read])
        for depth in range(1, NUM_DEEPER + 1):
            rows = rows[: len(ids) - depth - begin]
            if not rows:
                break
            states = makes.handed_on(np.array(draft.features.of(0, wish))[: len(rows)], [depth - 1] * len(rows))
            tokens = ids[begin + depth - 1 : begin + depth - 1 + len(rows)]
            made = Extension(slot, tokens, rows, inputs=makes.rows(tokens, states))
            rows = range(draft.num_rows(slot), draft.num_rows(slot) + len(tokens))
            (logits,) = draft.forward([made])
            yield depth, range(begin + depth, begin + depth + len(tokens)), as_array(logits)
    finally:
        draft.close(slot)
