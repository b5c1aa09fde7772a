"""Decisions of a round: draft first, wait, or verify what there is, and how much of it.

A policy decides and observes. It never speaks to the drafter, runs no model and reads no clock: the engine does what it
says and tells what came of it. `Policy` obeys the settings to the letter; `card.engine.policy.tuned` tunes what was
left open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from card.config import DraftSettings, Schedule
from card.drafting.drafter_pass import NO_END, TurnEnd
from card.engine.request import Request, StepResult
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.tree.nodes import Nodes


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """One schedule: the cores that the target computes on, and what passes were measured to cost there."""

    cores: CoreSet
    target: PassCost
    drafter: PassCost | None = None  # None: no drafter runs


@dataclass(frozen=True, slots=True)
class Draft:
    """Let a drafter that takes turns draft. It stops by itself."""

    num_passes: int  # at most
    end: TurnEnd = NO_END  # where it ends for each request before that


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the drafter for so long at most, then ask again."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RoundView:
    """View that a policy has of a round before its pass; what changes in it makes a new one."""

    requests: Sequence[Request]  # those that decode, R of them
    num_prompt_tokens: int  # tokens of prompts that the pass runs besides
    num_context_rows: int  # KV rows of the decoding requests
    takes_turns: bool  # the drafter only drafts when it is told to
    layers_per_pass: int = 1  # that a pass of such a drafter makes at most
    undrafted: Sequence[Nodes] = ()  # R or none; what other writers offer alone, before anything is drafted in turns
    num_short: int = 0  # requests that want to wait, for a drafter that is up: short of candidates, heard of since
    num_unread: int = 0  # requests whose text the drafter has yet to read: its next pass takes longer
    has_drafted: bool = False  # the drafter had its turn
    passes: Sequence[tuple[int, float]] = ()  # of that turn: requests that got candidates, and seconds
    waited_s: float = 0.0  # for the drafter


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round."""

    view: RoundView
    result: StepResult
    seconds: float  # from the start of the round to its end
    num_committed: int  # tokens of the decoding requests
    drafter_passes: int  # that were reported since the last round, summed over the requests
    drafter_busy_s: float  # seconds of these; a pass for several requests counts once in all


class Policy:
    """Decides what a round does: here what the settings say. One policy serves one engine.

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

    def __init__(self, schedule: Schedule, cores: CoreSet = CoreSet()) -> None:  # noqa: B008
        """Make a policy that obeys, under one schedule on the same cores all along."""
        self.schedule, self.reason = schedule, "as set"
        self.cores = self.reading_cores = cores

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        """Start a round of so many requests, prompts included: now the schedule may change to another available one."""

    def beam_width(self) -> int | None:
        """Return the width of the drafter's layers; None leaves it as the settings say."""
        return None

    def writer_budget(self, request: Request) -> int:
        """Return how many candidates of the request each local writer is asked for."""
        return request.draft.budget

    def prepare(self, view: RoundView) -> Draft | Wait | None:
        """Return what to do before the pass, asked once more after a wait; None to verify what there is."""
        if view.takes_turns:
            drafting = [request.draft.num_speculative_tokens for request in view.requests if request.uses_drafter]
            if drafting:
                return Draft(math.ceil(max(drafting) / view.layers_per_pass))
            return Draft(1) if view.num_prompt_tokens else None  # it reads the prompt in the prefill
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
        """Begin with what earlier starts have seen: the share of the draft model's tokens that were the target's."""

    @property
    def agreement(self) -> float | None:
        """Such a share as it was all along; None after too few rounds, and for a policy that learns nothing."""
        return None

    def measured(self) -> Mapping[Schedule, ScheduleCost]:
        """Return what passes cost by the rounds so far, with a point for each number of tokens that they had.

        Empty after too few rounds, and for a policy that learns nothing.
        """
        return {}


def drop_unlikely(offer: Nodes, draft: DraftSettings) -> Nodes:
    """Return the leading candidates that are likely enough to verify; scores behind the probes must not increase."""
    floor = math.log(draft.min_verify_prob) if draft.min_verify_prob > 0 else -math.inf
    scores = offer.path_logprobs[offer.num_probes :]
    count = next((i for i, score in enumerate(scores) if score < floor), len(scores))
    return offer.leading(min(offer.num_probes + count, draft.budget))


def bucket(num_rows: int) -> int:
    """Return the class of batch sizes or rows of a pass: 1, 2, 3-4, 5-8, 9-16, ..."""
    return max(num_rows - 1, 0).bit_length()
