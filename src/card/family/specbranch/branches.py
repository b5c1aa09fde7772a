"""SpecBranch: branch where the drafter is unsure, draft all branches while the rest is verified (arXiv:2506.01979).

The drafter stops at the first token whose probability is below ``branch_below``. While the target verifies the tokens
before it, the drafter extends several alternatives of that token. The alternative that the target chooses is kept. The
branch point depends only on the drafter's confidence, unless the setting ``hrad`` names a predictor, which reads the
target's hidden states (`card.family.specbranch`).
"""

from __future__ import annotations

from card.config import DraftSettings
from card.config.method import Method, in_rounds


def trunk_and_branches(draft: DraftSettings) -> DraftSettings:
    """Return settings under which a trunk of num_speculative_tokens at most is verified while its branches grow."""
    length = draft.num_speculative_tokens
    return in_rounds(draft, verify="trunk", growth="branch", budget=length, lead=2 * length, min_depth=length)


def passes_for_trunk_and_branches(draft: DraftSettings) -> list[int]:
    """Return the tokens of the drafter passes of a round: half of them on a trunk, which may end anywhere."""
    num_trunk = draft.num_speculative_tokens // 2
    return [1] * num_trunk + [draft.beam_width] * (draft.num_speculative_tokens - num_trunk)


METHOD = Method(
    name="specbranch",
    summary="branches at the first unsure token grow while the target verifies what is before it",
    placement="process",
    shape=trunk_and_branches,
    passes_of_round=passes_for_trunk_and_branches,
    reads=("hrad",),
)
