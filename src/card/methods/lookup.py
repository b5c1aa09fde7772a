"""Prompt lookup: copy what followed the last tokens earlier in the text (Saxena 2023, prompt lookup decoding)."""

from card.methods.method import Method

METHOD = Method(
    name="lookup",
    summary="copy what followed the last tokens earlier in the text; no draft model",
    needs_draft=False,
    shape=lambda draft: draft,
    writers=("lookup",),
    is_tuned=True,
)
