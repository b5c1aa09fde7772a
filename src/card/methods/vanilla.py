"""Plain decoding: one token per target pass."""

from card.methods.method import Method

METHOD = Method(
    name="vanilla",
    summary="plain decoding, one token per target pass",
    needs_draft=False,
    shape=lambda draft: draft,
)
