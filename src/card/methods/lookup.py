"""Prompt lookup: copy what followed the last tokens earlier in the text (Saxena 2023, prompt lookup decoding)."""

from card.methods.method import Method

METHOD = Method(
    name="lookup",
    summary="copy what followed the last tokens earlier in the text; no draft model",
    schedule="alone",
    placement="inline",
    shape=lambda draft: draft,
    writers=("lookup",),
    is_tuned=True,
)
