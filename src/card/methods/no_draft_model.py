"""Methods without a draft model: plain decoding, and those that are one local writer (`card.drafting.local`) alone."""

from card.methods.method import Method

VANILLA = Method(name="vanilla", summary="plain decoding, one token per target pass", needs_draft=False)

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

RECYCLING = Method(  # Token recycling, arXiv:2408.08696
    name="recycling",
    summary="a tree of the successors that the target thought likely before; no draft model",
    needs_draft=False,
    writers=("recycling",),
    is_tuned=True,
)

LOOKAHEAD = Method(  # arXiv:2402.02057
    name="lookahead",
    summary="n-grams from Jacobi iterations that ride on each target pass; no draft model",
    needs_draft=False,
    shape=lambda draft: draft.replace(budget=max(draft.budget, 32)),  # the window is verified, too
    writers=("lookahead",),
    is_tuned=True,
)
