"""CTC-drafter: a trained head over the target's hidden states drafts a tree, in turns with it (arXiv:2412.00061)."""

from card.methods.method import Method

METHOD = Method(
    name="ctc",
    summary="a tree by a trained head over the target's hidden states; no draft model",
    needs_draft=False,
    needs_head=True,
    writers=("ctc",),
    is_tuned=True,
    reads=("ctc",),
)
