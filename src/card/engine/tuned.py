"""The policy that tunes itself: every choice is the one that promises most committed tokens per second.

Within a round it weighs tokens against seconds at the rate that the engine reaches (`card.engine.choice`). Between
rounds it chooses the schedule: as predicted from the latencies measured at start, and once it was tried, as measured
(`card.engine.schedules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from card.config import DraftSettings
from card.engine.calibration import Calibration, Calibrations, DepthReport
from card.engine.choice import best_by_depth, choose, is_worth_drafting
from card.engine.cores import Home
from card.engine.forecast import Forecast, Station
from card.engine.policy import Draft, Outcome, RoundView, Wait, likely
from card.engine.schedules import REVIEW_EVERY, Schedules, bucket
from card.engine.switch import Arm
from card.nodes import Candidates
from card.offers import leading, select
from card.target import TargetRequest

_FIRST_SURVIVAL = 0.75  # chance that a path is accepted one layer deeper, in turns, until it has been measured
_SURVIVAL_WEIGHT = 0.02
_MOST_WAITED_LAYERS = 3
_MOST_FORESEEN_LAYERS = 8  # of which drafting in turns must pay
_WAIT_LATENCY_S = 3e-4  # from the target's correction to the drafter's next pass and back


class TunedPolicy:
    """Chooses schedule, beam and candidates by expected committed tokens per second; obeys what was set."""

    def __init__(
        self, stations: Mapping[Arm, Station], draft: DraftSettings, *, pinned: frozenset[str] = frozenset()
    ) -> None:
        """Start with predictions.

        Args:
            stations: the schedules to choose from, one or more.
            draft: the settings that serve as bounds.
            pinned: names of those that the user set: they are obeyed as they are.
        """
        self._draft = draft
        self._pinned = pinned
        self._forecast = Forecast(stations, draft, pinned)
        self._schedules = Schedules(self._forecast)
        self._calibrations = Calibrations()
        self._num_requests = 1
        self._rounds_undrafted = 0
        self._survival = _FIRST_SURVIVAL
        self._chances_before: list[float] = []
        self._depth_before_draft = -1
        self._width, self._lead = self._forecast.beam(self.arm, 1)

    @property
    def arm(self) -> Arm:
        """The schedule of the present round."""
        return self._schedules.arm

    @property
    def home(self) -> Home:
        """Where the target computes under the present schedule."""
        return self._forecast.stations[self.arm].home

    @property
    def reason(self) -> str:
        """Why this schedule."""
        return self._schedules.reason

    @property
    def stations(self) -> Mapping[Arm, Station]:
        """The schedules to choose from, with latencies as they were measured at start."""
        return dict(self._forecast.stations)

    def predicted(self, arm: Arm, num_requests: int = 1, agreement: float | None = None) -> float:
        """Return the tokens/s expected of a schedule, without regard to what it was measured to reach.

        Args:
            agreement: chance in [0, 1] that a candidate below an accepted one is accepted; None: as learnt so far.
        """
        return self._forecast.tokens_per_s(arm, num_requests, agreement)

    def calibration(self) -> tuple[DepthReport, ...]:
        """Return how often greedy candidates of the drafter were accepted, by depth."""
        return self._calibrations.of(True).report()

    def begin(self, num_requests: int, available: frozenset[Arm]) -> None:
        """Choose the schedule of a round and, where it or the batch has changed, the beam."""
        has_new_bucket = bucket(num_requests) != bucket(self._num_requests)
        self._num_requests = num_requests
        self._depth_before_draft = -1
        self._schedules.begin(num_requests, available)
        if has_new_bucket or self._schedules.rounds_here == 0:
            self._width, self._lead = self._forecast.beam(self.arm, num_requests)

    def beam(self) -> tuple[int, int]:
        """Return the beam's width and lead for this batch; what was set stays as it is."""
        return self._width, self._lead

    def prepare(self, view: RoundView) -> Draft | Wait | None:
        """Draft one more layer, or wait for the first ones, where that brings more than its time is worth."""
        if not view.requests:
            return Draft(1) if view.takes_turns and view.num_prompt_tokens and view.num_passes == 0 else None
        if view.takes_turns:
            return self._prepare_turn(view)
        if not view.is_up:
            return None
        if "max_wait_s" in self._pinned:
            longest = self._draft.max_wait_s
            return Wait(longest - view.waited_s) if view.num_short and longest > view.waited_s else None
        return self._prepare_wait(view)

    def choose(self, view: RoundView, offers: Sequence[Candidates]) -> Sequence[Candidates]:
        """Verify what promises more tokens than its seconds are worth at the present rate."""
        pairs = list(zip(view.requests, offers, strict=True))
        if "min_verify_prob" in self._pinned:
            floor, budget = self._draft.min_verify_prob, self._draft.budget
            return [likely(offer, floor, budget) for offer in offers]
        ranked = [self._ranked(request, offer) for request, offer in pairs]
        num_probes = sum(offer.num_probes for offer in offers)
        choice = choose(
            [probs for _, probs in ranked],
            seconds=self._seconds(view),
            rate=self._schedules.rate(),
            num_prefill_tokens=view.num_prompt_tokens + num_probes,
            max_per_request=self._draft.budget,
        )
        return [leading(offer, offer.num_probes + n) for (offer, _), n in zip(ranked, choice.counts, strict=True)]

    def _ranked(self, request: TargetRequest, offer: Candidates) -> tuple[Candidates, list[float]]:
        """Return the offer with the likeliest candidates first behind its probes, and the chances of these."""
        probs = self._calibrations.probabilities(request.params.temperature == 0.0, offer)
        if not offer.writers:
            return offer, probs  # those of one drafter are in a good order: `choose` sees to the rest
        num_probes = offer.num_probes
        order = sorted(range(num_probes, len(offer)), key=lambda idx: (-probs[idx], idx))
        ranked = replace(select(offer, [*range(num_probes), *order]), num_probes=num_probes)
        return ranked, [probs[idx] for idx in order]

    def observe(self, outcome: Outcome) -> None:
        """Learn acceptance, latencies and the rate from a round."""
        for one in outcome.result.verified:
            if one.offer:
                self._calibrations.observe(one.is_greedy, one.offer, one.accepted)
        self._forecast.observe(self.arm, self._width, outcome)
        self._rounds_undrafted = 0 if outcome.view.num_passes else self._rounds_undrafted + 1
        num_prompt_tokens = outcome.view.num_prompt_tokens
        self._schedules.observe(outcome.num_committed, outcome.result.num_tokens, num_prompt_tokens, outcome.seconds)

    def _prepare_turn(self, view: RoundView) -> Draft | None:
        depth = sum(depth for depth, _ in view.best_paths)
        if depth == self._depth_before_draft and view.num_passes > 1:
            return None  # the last pass made nothing deeper
        self._depth_before_draft = depth
        chances = self._path_chances(view)
        if self._rounds_undrafted >= REVIEW_EVERY and view.num_passes < 2:
            return Draft(1)  # to learn whether it has become worth while
        num_requests = len(view.requests)
        seconds = self._seconds(view)
        num_tokens = num_requests + depth + view.num_prompt_tokens
        verify_s = seconds(num_tokens + num_requests) - seconds(num_tokens)
        is_worth = is_worth_drafting(
            self._gains(view, chances), seconds=self._draft_s(num_requests) + verify_s, rate=self._schedules.rate()
        )
        return Draft(1) if is_worth else None

    def _gains(self, view: RoundView, chances: Sequence[float]) -> list[float]:
        """Return the tokens that each of the next layers brings over all requests, where other writers bring less."""
        gains = [0.0] * _MOST_FORESEEN_LAYERS
        undrafted = view.undrafted or [Candidates.none()] * len(chances)
        for request, offer, chance, (depth, _) in zip(view.requests, undrafted, chances, view.best_paths, strict=True):
            others = best_by_depth(offer, self._calibrations.probabilities(request.params.temperature == 0.0, offer))
            for layer in range(_MOST_FORESEEN_LAYERS):
                reached = chance * self._survival ** (layer + 1)
                there = others[depth + layer] if depth + layer < len(others) else 0.0
                gains[layer] += max(0.0, reached - there)
        return gains

    def _path_chances(self, view: RoundView) -> list[float]:
        """Return the chance that each best path is accepted to its end; learn by how much a layer lowers it."""
        chances = [
            self._calibration(request).probability(depth, path_logprob) if depth else float(request.uses_drafter)
            for request, (depth, path_logprob) in zip(view.requests, view.best_paths, strict=True)
        ]
        if view.num_passes and len(self._chances_before) == len(chances):
            grown = [
                (before, after)
                for (before, after) in zip(self._chances_before, chances, strict=True)
                if before != after
            ]
            if total_before := sum(before for before, _ in grown):
                now = min(1.0, sum(after for _, after in grown) / total_before)
                self._survival += _SURVIVAL_WEIGHT * (now - self._survival)
        self._chances_before = chances
        return chances

    def _prepare_wait(self, view: RoundView) -> Wait | None:
        """Wait for up to a few layers when no request has any candidate; others never wait for one that missed."""
        num_requests, layer_s = len(view.requests), self._draft_s(len(view.requests))
        if view.num_prompt_tokens or layer_s <= 0 or not view.num_short:
            return None
        if view.waited_s == 0 and any(depth for depth, _ in view.best_paths):
            return None
        seconds, rate = self._seconds(view), self._schedules.rate()
        drafted = [request for request in view.requests if request.uses_drafter]
        gains = [self._calibration(request).next_probability(0, 0.0) for request in drafted]
        agreement = self._forecast.agreement
        best_layers, best_value, expected = 0, 0.0, 0.0
        for layers in range(1, _MOST_WAITED_LAYERS + 1):
            expected += sum(gains) * agreement ** (layers - 1)
            verify_s = seconds(num_requests * (1 + layers)) - seconds(num_requests)
            value = expected - rate * (_WAIT_LATENCY_S + layers * layer_s + verify_s)
            if value > best_value:
                best_layers, best_value = layers, value
        longest = 2 * (_WAIT_LATENCY_S + best_layers * layer_s)
        pairs = zip(view.requests, view.best_paths, strict=True)
        is_short = min(depth for request, (depth, _) in pairs if request.uses_drafter) < best_layers
        return Wait(longest - view.waited_s) if best_layers and is_short and view.waited_s < longest else None

    def _calibration(self, request: TargetRequest) -> Calibration:
        return self._calibrations.of(request.params.temperature == 0.0)

    def _draft_s(self, num_requests: int) -> float:
        return self._forecast.draft_s(self.arm, num_requests, self._width)

    def _seconds(self, view: RoundView) -> Callable[[int], float]:
        return self._forecast.seconds(self.arm, view)
