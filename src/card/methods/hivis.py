"""HiViS: a drafter reads text and the target's hidden states, and never places of images (arXiv:2509.23928)."""

from card.methods.method import Method

METHOD = Method(
    name="hivis",
    summary="a tree by a trained drafter that reads text and the target's hidden states; no draft model",
    needs_draft=False,
    needs_head=True,
    writers=("hivis",),
    is_tuned=True,
    reads=("hivis",),
)
