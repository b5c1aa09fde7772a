"""Token recycling: a tree from the likeliest successors seen so far (arXiv:2408.08696)."""

from card.methods.method import Method

METHOD = Method(
    name="recycling",
    summary="a tree of the successors that the target thought likely before; no draft model",
    needs_draft=False,
    shape=lambda draft: draft,
    writers=("recycling",),
    is_tuned=True,
)
