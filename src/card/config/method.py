"""Differences between decoding methods: who drafts, when, and in which shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from card.config.drafting import DraftSettings
from card.config.engine import EngineSettings, Placement

_LONGEST_WAIT_S = 1.0  # for the drafts of a round; a drafter that takes longer is not waited for


def in_rounds(draft: DraftSettings, *, min_depth: int, **shape: Any) -> DraftSettings:
    """Return settings under which the target waits for drafts so deep, and verifies them however unlikely they are.

    Args:
        shape: other settings that the method imposes.
    """
    return draft.replace(
        min_depth=min_depth, max_wait_s=_LONGEST_WAIT_S, min_verify_prob=0.0, min_path_logprob=-1e9, **shape
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One decoding method on the shared cache, workers and verifier."""

    name: str
    summary: str
    needs_draft: bool = True  # it cannot run without a draft model
    needs_parallel_draft: bool = False  # that model has to be one that guesses several tokens in a pass
    needs_head: bool = False  # the setting of its writer has to name a trained head
    placement: Placement = "inline"  # of its drafter, unless set; inline is in turns with the target
    shape: Callable[[DraftSettings], DraftSettings] = lambda draft: draft  # settings imposed on the user's
    writers: tuple[str, ...] = ()  # local writers that belong to it
    usual_writers: tuple[str, ...] = ()  # local writers that join a tuned policy, unless the writers are named
    selection: str | None = None  # KV rows that the target reads when it drafts for itself; None: it does not
    select: Callable[[EngineSettings], str | None] = lambda settings: None  # those that the settings name instead
    num_looked_up: int = 0  # candidates that each of its own drafting passes verifies, found earlier in the text
    is_tuned: bool = False  # what was not set is chosen by measurement, the schedule included
    reads: tuple[str, ...] = ()  # settings of its folder that it reads
    runs: str = ""  # place of what runs it in `card generate`, if no single engine can
    in_python: str = ""  # of such a method: its class
    settings: type[Any] | None = None  # of such a method: its own options
    passes_of_round: Callable[[DraftSettings], Sequence[int]] | None = None  # tokens in each, for `round_length`

    @property
    def needs_training(self) -> bool:
        """True if it drafts with what a training made, so that an ordinary pair does not run it."""
        return self.needs_parallel_draft or self.needs_head

    @property
    def length_from_latencies(self) -> bool:
        """True if num_speculative_tokens, unless set, is what the drafter makes while the target runs once."""
        return self.passes_of_round is not None
