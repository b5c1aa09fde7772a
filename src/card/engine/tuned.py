"""The policy that tunes itself: every choice is the one that promises most committed tokens per second.

Within a round it weighs tokens against seconds at the rate that the engine reaches (`card.engine.choice`). Between
rounds it chooses the schedule: as predicted from the latencies measured at start, and once it was tried, as measured
(`card.engine.schedules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from card.config import DraftSettings
from card.engine.calibration import Calibration, Calibrations, DepthReport
from card.engine.choice import best_by_depth, choose, is_worth_drafting
from card.engine.cores import Home
from card.engine.forecast import Forecast, Guess, Station
from card.engine.policy import Draft, Outcome, RoundView, Wait, likely
from card.engine.schedules import Schedules, bucket
from card.transport.switch import Arm
from card.tree.nodes import Candidates
from card.workers.offers import leading, select
from card.workers.request import Request

_AT_REST = 16  # rounds without drafting, in turns, after which the drafter reads no prompt ahead
_FIRST_TRY, _LAST_TRY = 256, 1024  # the same until drafting is tried; twice as many each time in vain
_TRY_PASSES = 2
_UNLIKELY = 0.5  # chance of others' likeliest next token below which a try may be worth something in itself
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
        self._known: dict[int, tuple[Candidates, list[float]]] = {}  # by id, what was calibrated in this round
        self._num_requests = 1
        self._rounds_undrafted = 0
        self._try_after = _FIRST_TRY
        self._is_try = False
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
    def reading_home(self) -> Home:
        """Where the target reads long prompts: with all its cores, though a drafter beside it has one of them."""
        stations = self._forecast.stations
        return stations.get("off", stations[self.arm]).home

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
        self._known.clear()
        self._is_try = False
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
            is_to_read = view.takes_turns and view.num_prompt_tokens and view.num_passes == 0
            return Draft(1) if is_to_read and self._rounds_undrafted < _AT_REST else None
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
        chosen = zip(offers, ranked, choice.counts, strict=True)
        return [self._taken(offer, order[: offer.num_probes + n]) for offer, (order, _), n in chosen]

    def _ranked(self, request: Request, offer: Candidates) -> tuple[Sequence[int], list[float]]:
        """Return the offer's indices, the likeliest candidates first behind its probes, and the chances of these."""
        probs, num_probes = self._probabilities(request.params.temperature == 0.0, offer), offer.num_probes
        if not offer.writers:
            return range(len(offer)), probs  # those of one drafter are in a good order: `choose` sees to the rest
        order = sorted(range(num_probes, len(offer)), key=lambda idx: (-probs[idx], idx))
        return [*range(num_probes), *order], [probs[idx] for idx in order]

    def _taken(self, offer: Candidates, indices: Sequence[int]) -> Candidates:
        """Return these candidates in this order, probes first, and remember their chances."""
        if not offer.writers:
            return leading(offer, len(indices))
        taken, (_, probs) = select(offer, indices, num_probes=offer.num_probes), self._known[id(offer)]
        self._known[id(taken)] = taken, [probs[idx] for idx in indices]
        return taken

    def observe(self, outcome: Outcome) -> None:
        """Learn acceptance, latencies and the rate from a round."""
        verified = outcome.result.verified
        probs = [self._probabilities(one.is_greedy, one.offer) for one in verified]
        guesses = [Guess.of(one.offer, of_one, one.accepted) for one, of_one in zip(verified, probs, strict=True)]
        for one in verified:
            if one.offer:
                self._calibrations.observe(one.is_greedy, one.offer, one.accepted)
        self._forecast.observe(self.arm, self._width, outcome, guesses)
        if outcome.view.requests:
            self._count_drafting(outcome.view.num_passes)
        num_prompt_tokens = outcome.view.num_prompt_tokens
        self._schedules.observe(outcome.num_committed, outcome.result.num_tokens, num_prompt_tokens, outcome.seconds)

    def _prepare_turn(self, view: RoundView) -> Draft | None:
        depth = sum(depth for depth, _ in view.best_paths)
        if depth == self._depth_before_draft and view.num_passes > 1:
            return None  # the last pass made nothing deeper
        self._depth_before_draft = depth
        self._is_try = self._is_due(view)
        if self._is_try and view.num_passes < _TRY_PASSES:
            return Draft(1)  # to learn whether it has become worth while
        num_requests, rate = len(view.requests), self._schedules.rate()
        draft_s, agreement = self._draft_s(num_requests), self._forecast.agreement
        if num_requests * agreement <= rate * draft_s:
            return None  # not even if nobody else had a candidate and verifying were free; deeper layers bring less
        seconds, num_tokens = self._seconds(view), num_requests + depth + view.num_prompt_tokens
        verify_s = (seconds(num_tokens + num_requests) - seconds(num_tokens)) / num_requests
        return Draft(1) if is_worth_drafting(self._gains(view, rate * verify_s), seconds=draft_s, rate=rate) else None

    def _is_due(self, view: RoundView) -> bool:
        """Return whether drafting is to be tried: after a while without it, where nobody else knows what comes next."""
        if self._rounds_undrafted < self._try_after or view.num_passes > _TRY_PASSES:
            return False
        if not view.undrafted:
            return True
        pairs = [pair for pair in zip(view.requests, view.undrafted, strict=True) if pair[0].uses_drafter]
        return any(
            max(self._probabilities(request.params.temperature == 0.0, offer), default=0.0) < _UNLIKELY
            for request, offer in pairs
        )

    def _count_drafting(self, num_passes: int) -> None:
        """Note whether a round drafted in turns, and how long to go without if that was a try in vain."""
        self._rounds_undrafted = 0 if num_passes or self.arm == "beside" else self._rounds_undrafted + 1
        if num_passes:
            self._try_after = min(2 * self._try_after, _LAST_TRY) if self._is_try else _FIRST_TRY

    def _gains(self, view: RoundView, price: float) -> list[float]:
        """Return the tokens that each of the next layers brings over all requests, where other writers bring less.

        Args:
            price: tokens that verifying a candidate must bring. It is paid for layers that come on top of what would be
                verified without them: likelier candidates take the place of others.
        """
        gains, agreement = [0.0] * _MOST_FORESEEN_LAYERS, self._forecast.agreement
        chances = self._path_chances(view)
        undrafted = view.undrafted or [Candidates.none()] * len(chances)
        for request, offer, chance, (depth, _) in zip(view.requests, undrafted, chances, view.best_paths, strict=True):
            if not request.uses_drafter:
                continue
            probs = self._probabilities(request.params.temperature == 0.0, offer)
            others, num_verified = best_by_depth(offer, probs), sum(prob > price for prob in probs)
            for layer in range(_MOST_FORESEEN_LAYERS):
                reached = chance * agreement ** (layer + 1)
                there = others[depth + layer] if depth + layer < len(others) else 0.0
                gains[layer] += max(0.0, reached - there) - price * (depth + layer >= num_verified)
        return gains

    def _path_chances(self, view: RoundView) -> list[float]:
        """Return the chance that each best path is accepted to its end."""
        return [
            self._calibration(request).probability(depth, path_logprob) if depth else float(request.uses_drafter)
            for request, (depth, path_logprob) in zip(view.requests, view.best_paths, strict=True)
        ]

    def _prepare_wait(self, view: RoundView) -> Wait | None:
        """Wait for up to a few layers when no request has any candidate; others never wait for one that missed."""
        num_requests, layer_s = len(view.requests), self._draft_s(len(view.requests))
        if view.num_prompt_tokens or layer_s <= 0 or not view.num_short:
            return None
        if view.waited_s == 0 and any(depth for depth, _ in view.best_paths):
            return None
        seconds, rate = self._seconds(view), self._schedules.rate()
        agreement, gains = self._forecast.agreement, [0.0] * _MOST_WAITED_LAYERS
        for request, offer in zip(view.requests, view.undrafted or [Candidates.none()] * num_requests, strict=True):
            if request.uses_drafter:
                others = best_by_depth(offer, self._probabilities(request.params.temperature == 0.0, offer))
                first = self._calibration(request).next_probability(0, 0.0)
                for layer in range(_MOST_WAITED_LAYERS):
                    there = others[layer] if layer < len(others) else 0.0
                    gains[layer] += max(0.0, first * agreement**layer - there)
        best_layers, best_value, expected = 0, 0.0, 0.0
        for layers in range(1, _MOST_WAITED_LAYERS + 1):
            expected += gains[layers - 1]
            verify_s = seconds(num_requests * (1 + layers)) - seconds(num_requests)
            value = expected - rate * (_WAIT_LATENCY_S + layers * layer_s + verify_s)
            if value > best_value:
                best_layers, best_value = layers, value
        longest = 2 * (_WAIT_LATENCY_S + best_layers * layer_s)
        pairs = zip(view.requests, view.best_paths, strict=True)
        is_short = min(depth for request, (depth, _) in pairs if request.uses_drafter) < best_layers
        return Wait(longest - view.waited_s) if best_layers and is_short and view.waited_s < longest else None

    def _probabilities(self, is_greedy: bool, offer: Candidates) -> list[float]:
        """Return the chance of each candidate; the same offer is often looked at two or three times in a round."""
        known = self._known.get(id(offer))
        if known is None:
            known = offer, self._calibrations.probabilities(is_greedy, offer)
            self._known[id(offer)] = known
        return known[1]

    def _calibration(self, request: Request) -> Calibration:
        return self._calibrations.of(request.params.temperature == 0.0)

    def _draft_s(self, num_requests: int) -> float:
        return self._forecast.draft_s(self.arm, num_requests, self._width)

    def _seconds(self, view: RoundView) -> Callable[[int], float]:
        return self._forecast.seconds(self.arm, view)
