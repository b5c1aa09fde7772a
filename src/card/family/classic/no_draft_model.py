"""Methods without a draft model: plain decoding, and single local writers (`card.drafting.local`)."""

from card.config.method import BenchRow, Method

VANILLA = Method(
    name="vanilla",
    summary="plain decoding, one token per target pass",
    needs_draft=False,
    rows=(BenchRow(name="vanilla", has_twin=True),),
)

LOOKUP = Method(  # Saxena 2023, prompt lookup decoding
    name="lookup",
    summary="copy what followed the last tokens earlier in the text; no draft model",
    needs_draft=False,
    writers=("lookup",),
    is_tuned=True,
)

SUFFIX = Method(  # SAM decoding, arXiv:2411.10666
    name="suffix",
    summary="follow the longest match in the text so far, by a suffix automaton; no draft model",
    needs_draft=False,
    writers=("suffix",),
    is_tuned=True,
)
