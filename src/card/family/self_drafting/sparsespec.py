"""SparseSpec: the target drafts for itself, reading few KV rows, and verifies reading all (arXiv:2512.01278).

With the selection ``vegas`` it is Vegas (arXiv:2602.07223): rows are ranked by attention logits instead of weights.
"""

from __future__ import annotations

from card.config import DraftSettings
from card.config.method import Method
from card.family.self_drafting.settings import named_selection


def chain_of_itself(draft: DraftSettings) -> DraftSettings:
    """Return settings under which the whole draft of the target is verified."""
    return draft.replace(verify="chain", budget=draft.num_speculative_tokens, min_verify_prob=0.0)


METHOD = Method(
    name="sparsespec",
    summary="the target drafts for itself, reading the KV rows that mattered last; no draft model",
    needs_draft=False,
    shape=chain_of_itself,
    selection="sparse",
    select=named_selection,
    reads=("kv_selection",),
)
