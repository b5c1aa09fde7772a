"""SpecPV: drafts are verified over few KV rows first, and over all of them every so often (arXiv:2512.02337).

Exact: tokens that pass partial verifications are a draft, which a full verification checks. With the judge ``partial``
all of them are accepted, as published; every result then says that it is not exact. The published drafter is EAGLE-3;
this one copies candidates from earlier text and needs no model.
"""

from __future__ import annotations

from card.config import DraftSettings
from card.config.method import Method
from card.family.self_drafting.settings import named_selection
from card.family.self_drafting.sparsespec import chain_of_itself

_MOST_CANDIDATES = 8  # of a partial verification


def chain_as_long_as_the_lead(draft: DraftSettings) -> DraftSettings:
    """Return settings under which ``lead`` tokens pass partial verifications before a full one."""
    return chain_of_itself(draft.replace(num_speculative_tokens=draft.lead))


METHOD = Method(
    name="specpv",
    summary="verifies over few KV rows, and over all after --lead tokens; no draft model",
    needs_draft=False,
    shape=chain_as_long_as_the_lead,
    selection="quest",
    num_looked_up=_MOST_CANDIDATES,
    select=named_selection,
    reads=("kv_selection",),
)
