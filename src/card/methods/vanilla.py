"""Plain decoding: one token per target pass."""

from card.methods.method import Method

METHOD = Method(
    name="vanilla",
    summary="plain decoding, one token per target pass",
    schedule="alone",
    placement="inline",
    shape=lambda draft: draft,
)
