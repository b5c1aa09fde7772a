"""Methods that consist of one copying writer."""

from card.config.method import Method

RECYCLING = Method(  # Token recycling, arXiv:2408.08696
    name="recycling",
    summary="a tree of the successors that the target thought likely before; no draft model",
    needs_draft=False,
    writers=("recycling",),
    is_tuned=True,
)

LOOKAHEAD = Method(  # arXiv:2402.02057
    name="lookahead",
    summary="n-grams from Jacobi iterations that ride on each target pass; no draft model",
    needs_draft=False,
    shape=lambda draft: draft.replace(budget=max(draft.budget, 32)),  # the window is verified, too
    writers=("lookahead",),
    is_tuned=True,
)
