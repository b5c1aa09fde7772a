"""Record the drafts of methods with a drafter of their own: a trained head, an adapted model, the target itself.

The drafts of a target that reads few KV rows depend on the rounds before. So the method decodes the recorded texts, and
each drafted token is marked. The drafts of a head depend on the text alone (`head_drafts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from card.api.llm import LLM
from card.config import ResolvedParams
from card.config.method import Method
from card.config.registry import find_method
from card.engine.request import CORRECTED, PLAIN
from card.errors import PlanError
from card.tools.planner.recording import TargetText

HEAD = "ctc"  # the writer whose candidates are recorded


def has_own_drafter(method: Method) -> bool:
    """Return whether an exact method drafts differently from a draft model of one token a pass."""
    return method.is_exact and (method.needs_training or method.selection is not None)


def check_exact(method: Method) -> None:
    """Raise PlanError for a method that writes another text: recorded texts cannot tell what it accepts."""
    if not method.is_exact:
        raise PlanError(f"{method.name} writes another text than the target's, which no recording has; leave it out")


def check_recordable(names: Sequence[str], head: str | None) -> None:
    """Check the names of methods to record.

    Raises:
        SettingsError: a method is unknown.
        PlanError: every recording covers a method, or it is not exact, or it lacks its head.
    """
    for name in names:
        method = find_method(name)
        check_exact(method)
        if not has_own_drafter(method):
            raise PlanError(
                f"every recording covers {name}; name methods with a drafter of their own, such as sparsespec"
            )
        if method.needs_head and head is None:
            raise PlanError(f"to record {name} give the head of card train ctc: --ctc FILE")


def drafted_tokens(origins: Sequence[str], length: int) -> bytes:
    """Return which tokens of a text were drafted, in the format of `RecordedText.drafted`.

    A draft that was accepted whole is followed by a token of the target's own. It counts as drafted: a longer draft
    would probably have had it.

    Args:
        origins: of the tokens, see `TokenDetails`.
        length: most tokens of a draft.
    """
    is_drafted = np.array([origin not in (CORRECTED, PLAIN) for origin in origins], np.bool_)
    ends = np.flatnonzero(
        np.diff(is_drafted, prepend=False, append=False)
    )  # where runs of drafted tokens begin and end
    for start, stop in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True):
        if stop - start == length and stop < len(is_drafted):
            is_drafted[stop] = True
    return is_drafted.tobytes()


def record_method(
    name: str,
    target: Any,
    draft: Any,
    answers: Sequence[TargetText],
    params: ResolvedParams,
    tell: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> list[bytes]:
    """Let a method decode the recorded prompts; return for each text which tokens were drafted.

    Args:
        target: loaded; so is ``draft``, which only methods with a draft model use.
        settings: further ones of `LLM`.
    Raises: PlanError if a text differs from plain decoding's; ModelError, SettingsError as of `LLM`.
    """
    method = find_method(name)
    if method.needs_draft:
        settings |= {"placement": "inline"}
    drafts = []
    models = (target, draft) if method.needs_draft else (target,)
    with LLM(*models, method=name, max_num_seqs=1, policy="fixed", **settings) as llm:
        for idx, answer in enumerate(answers):
            tell(f"{name} decodes text {idx + 1} of {len(answers)}")
            completion = llm.generate([list(answer.prompt_ids)], params)[0].outputs[0]
            if completion.token_ids != answer.token_ids:
                raise PlanError(
                    f"{name} has written text {idx} otherwise than plain decoding, as 16-bit passes of torch may;"
                    " record with --dtype float32"
                )
            drafts.append(drafted_tokens(completion.origins, llm.host.plan.draft.num_speculative_tokens))
    return drafts
