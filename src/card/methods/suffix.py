"""The longest match in the text so far, by a suffix automaton (SAM decoding, arXiv:2411.10666)."""

from card.methods.method import Method

METHOD = Method(
    name="suffix",
    summary="follow the longest match in the text so far, by a suffix automaton; no draft model",
    needs_draft=False,
    shape=lambda draft: draft,
    writers=("suffix",),
    is_tuned=True,
)
