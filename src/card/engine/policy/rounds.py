"""Decisions of a round: draft first, wait, or verify what there is, and how much of it.

A policy decides and observes. It never speaks to the drafter, runs no model and reads no clock: the engine carries out
its decisions and reports the result. `Policy` follows the settings exactly; `card.engine.policy.tuned` tunes what the
settings leave open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from card.config import DraftSettings, Schedule
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.engine.request import Request, StepResult
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.tree.nodes import Nodes


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """One schedule: the cores that the target computes on, and the measured cost of passes there."""

    cores: CoreSet
    target: PassCost
    drafter: PassCost | None = None  # None: no drafter runs


@dataclass(frozen=True, slots=True)
class Draft:
    """Let a drafter in turns draft. It stops by itself."""

    num_passes: int  # at most
    end: TurnEnd = NO_END  # rule by which it ends earlier for a request


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the drafter for at most this long, then ask again."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RoundView:
    """State of a round before its pass, as a policy sees it; each change makes a new object."""

    requests: Sequence[Request]  # those that decode, R of them
    num_prompt_tokens: int  # prompt tokens that the pass also runs
    num_context_rows: int  # KV rows of the decoding requests
    takes_turns: bool  # the drafter drafts only on request
    layers_per_pass: int = 1  # most layers that one pass of such a drafter makes
    undrafted: Sequence[Nodes] = ()  # R or none; offers of the other writers alone, before a turn
    num_short: int = 0  # requests that wait for a drafter: short of candidates, and the drafter answers
    has_drafted: bool = False  # the drafter had its turn
    passes: Sequence[tuple[int, float]] = ()  # of that turn: number of requests that got candidates, seconds
    waited_s: float = 0.0  # for the drafter
    num_prompt_pairs: int = 0  # of a prompt token of the pass and a row that its request held before


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round."""

    view: RoundView
    result: StepResult
    seconds: float  # from the start of the round to its end
    num_committed: int  # tokens of the decoding requests
    drafter_passes: int  # reported since the last round, summed over the requests
    drafter_busy_s: float  # seconds of these; a pass for several requests counts once


class Policy:
    """Decides what a round does; this class follows the settings. One policy serves one engine.

    `card.engine.policy.tuned.TunedPolicy` chooses instead, and learns from each round.
    """

    schedule: Schedule
    """The schedule of the present round."""
    cores: CoreSet
    """Cores where the target computes in the present round."""
    reading_cores: CoreSet
    """Cores where the target computes in a round that only reads a long prompt."""
    reason: str
    """Reason for this schedule, in a few words for the statistics."""
    undrafted: Mapping[int, str] = MappingProxyType({})
    """Reasons not to ask the drafter in this round, by number of the request, in the words of `card.engine.asked`."""

    def __init__(self, schedule: Schedule, cores: CoreSet = CoreSet()) -> None:  # noqa: B008
        """Make a policy that keeps one schedule on the same cores."""
        self.schedule, self.reason = schedule, "as set"
        self.cores = self.reading_cores = cores

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        """Start a round of so many requests, prompts included; the schedule may change to another available one."""

    def beam_width(self) -> int | None:
        """Return the width of the drafter's layers; None leaves it as the settings say."""
        return None

    def writer_budget(self, request: Request) -> int:
        """Return how many candidates each local writer is asked for in this request."""
        return request.draft.budget

    def prepare(self, view: RoundView) -> Draft | Wait | None:
        """Return what to do before the pass; asked again after a wait; None to verify the present candidates."""
        if view.takes_turns:
            drafting = [request.draft.num_speculative_tokens for request in view.requests if request.uses_drafter]
            if drafting:
                return Draft(math.ceil(max(drafting) / view.layers_per_pass))
            return Draft(1) if view.num_prompt_tokens else None  # the drafter reads the prompt during the prefill
        if view.num_short:
            longest = max(request.draft.max_wait_s for request in view.requests)
            if longest > view.waited_s:
                return Wait(longest - view.waited_s)
        return None

    def choose(self, view: RoundView, offers: Sequence[Nodes]) -> Sequence[Nodes]:
        """Return what to verify of each offer: all its probes, and at most the budget of its request."""
        return [drop_unlikely(offer, request.draft) for request, offer in zip(view.requests, offers, strict=True)]

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished round."""

    def recall(self, agreement: float) -> None:
        """Begin with the share of the draft model's tokens that were the target's in earlier runs."""

    @property
    def agreement(self) -> float | None:
        """Share of the draft model's tokens that were the target's, over all texts.

        None after too few rounds, and for a policy that learns nothing.
        """
        return None


def drop_unlikely(offer: Nodes, draft: DraftSettings) -> Nodes:
    """Return the leading candidates that are likely enough to verify; scores after the probes must not increase."""
    floor = math.log(draft.min_verify_prob) if draft.min_verify_prob > 0 else -math.inf
    scores = offer.path_logprobs[offer.num_probes :]
    count = next((i for i, score in enumerate(scores) if score < floor), len(scores))
    return offer.leading(min(offer.num_probes + count, draft.budget))


def bucket(num_rows: int) -> int:
    """Return the class of batch sizes or rows of a pass: 1, 2, 3-4, 5-8, 9-16, ..."""
    return max(num_rows - 1, 0).bit_length()
