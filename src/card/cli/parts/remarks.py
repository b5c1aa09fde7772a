"""Remarks of a command beside an answer: its end at a bound, and what would be faster or better."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from card.cli.parts.options import DEMO_TARGET
from card.cli.parts.starting import tell
from card.config import SamplingParams

if TYPE_CHECKING:  # loaded when a command runs
    from card.api.llm import LLM

_KNOWS = "is built in and small: it knows grade-school word problems only"
_HINTED = "card.cli.parts.remarks.hinted"  # of a command's run


def demo_note(target: str) -> str:
    """Return a note about the answers of the demo target; empty for other models."""
    return f"{DEMO_TARGET} {_KNOWS}, and is often wrong; name another with --target" if target == DEMO_TARGET else ""


def hint_at_int8(could_run_int8: bool, say: Callable[[str], None] = tell) -> None:
    """Say once how weights that run as stored could be faster, unless --dtype is given.

    Args:
        could_run_int8: of the target.
    """
    context = click.get_current_context(silent=True)
    if not could_run_int8 or context is None or _HINTED in context.meta:
        return
    if context.get_parameter_source("dtype") is ParameterSource.DEFAULT:
        context.meta[_HINTED] = True
        say(
            "the weights run as they are stored; --dtype int8 reads half as much and is faster on processors with "
            "AVX-512, but may change words (docs/int8.md)"
        )


def remark(llm: LLM, params: SamplingParams, num_new_tokens: int, reason: str | None) -> None:
    """Say, after an answer, what cut it off, if anything did, and once what would be faster.

    Args:
        reason: of the text's end; None if it was left as it repeats itself.
    """
    if reason is None:
        tell(f"the answer is cut off: it repeats itself. {DEMO_TARGET} {_KNOWS}; --max-tokens shows more")
    if reason == "length":
        most = llm.host.bound_of(params)
        why = f"the context of {llm.max_model_len} tokens is full; --max-model-len raises it if the model allows"
        if most is not None and num_new_tokens >= most:
            why = f"{most} tokens are the most{'' if params.max_tokens else ' by the model'}; --max-tokens allows more"
        tell(f"the answer is cut off: {why}")
    hint_at_int8(llm.host.could_run_int8)
