"""Differences between decoding methods: what drafts, when, and in which shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from card.config.drafting import DraftSettings
from card.config.engine import EngineSettings, Placement

ALONE = "suffix"  # the default method without a draft model; docs/methods.md has the reason
Drafter = Literal["none", "turns", "beside", "own"]  # no model, in turns, on a core of its own, or the policy's choice
_LONGEST_WAIT_S = 1.0  # for the drafts of a round; the target does not wait longer


def in_rounds(draft: DraftSettings, *, min_depth: int, **shape: Any) -> DraftSettings:
    """Return settings under which the target waits for drafts of this depth, and verifies even unlikely ones.

    Args:
        shape: other settings that the method imposes.
    """
    return draft.replace(
        min_depth=min_depth, max_wait_s=_LONGEST_WAIT_S, min_verify_prob=0.0, min_path_logprob=-1e9, **shape
    )


def default_method(*, has_draft: bool) -> str:
    """Return the name of the method that command line, server and Python take where none is named."""
    return "card" if has_draft else ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """A row of `card bench`. Beside a drafter it has the target's cores, else the cores that its name says."""

    name: str
    drafter: Drafter = "none"
    is_tuned: bool = False  # policy auto, and nothing set
    has_lengths: bool = False  # the fastest of the given draft lengths is taken
    is_as_shipped: bool = False  # the method's own draft settings: its length from latencies, if it has one
    takes_options: bool = False  # reads the draft settings that the user gives
    draft: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    has_twin: bool = False  # there is one on all cores, too
    has_uncoupled: bool = False  # there is one without coupled noise, too
    is_best: bool = True  # worth comparing with other methods


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One decoding method on the shared cache, workers and verifier."""

    name: str
    summary: str
    needs_draft: bool = True  # it cannot run without a draft model
    needs_parallel_draft: bool = False  # the draft model must guess several tokens in a pass
    needs_head: bool = False  # the first setting that it reads must name a trained head, of its writer or its verifier
    is_exact: bool = True  # its text is that of plain decoding
    placement: Placement = "inline"  # of its drafter, unless set; inline is in turns with the target
    shape: Callable[[DraftSettings], DraftSettings] = lambda draft: draft  # changes to the user's settings
    writers: tuple[str, ...] = ()  # local writers that belong to it
    usual_writers: tuple[str, ...] = ()  # local writers of a tuned policy, unless writers are set
    selection: str | None = None  # KV rows read in self-drafting; None: no self-drafting
    select: Callable[[EngineSettings], str | None] = lambda settings: None  # the rows that the settings name instead
    num_looked_up: int = 0  # candidates from earlier text that each of its drafting passes verifies
    is_tuned: bool = False  # unset options are chosen by measurement, including the schedule
    reads: tuple[str, ...] = ()  # settings of its folder that it reads
    rows: tuple[BenchRow, ...] = ()  # of `card bench`; empty: one, which follows from the fields above
    passes_of_round: Callable[[DraftSettings], Sequence[int]] | None = None  # tokens in each, for `round_length`

    @property
    def needs_training(self) -> bool:
        """True if it drafts with a trained part, so that an ordinary pair cannot run it."""
        return self.needs_parallel_draft or self.needs_head

    @property
    def length_from_latencies(self) -> bool:
        """True if num_speculative_tokens, unless set, is the number drafted during one target pass."""
        return self.passes_of_round is not None
