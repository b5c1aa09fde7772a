"""Lookahead decoding: Jacobi iterations in the target pass fill a pool of n-grams (arXiv:2402.02057)."""

from card.methods.method import Method

METHOD = Method(
    name="lookahead",
    summary="n-grams from Jacobi iterations that ride on each target pass; no draft model",
    needs_draft=False,
    shape=lambda draft: draft.replace(budget=max(draft.budget, 32)),  # the window is verified, too
    writers=("lookahead",),
    is_tuned=True,
)
