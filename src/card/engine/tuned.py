"""The policy that tunes itself: every choice is the one that promises most committed tokens per second.

Within a round it weighs tokens against seconds at the rate that the engine reaches (`card.engine.choice`). Between
rounds it chooses the schedule: as predicted from the latencies measured at start, and once it was tried, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from card.config import DraftSettings
from card.engine.calibration import Calibration, Calibrations, DepthReport
from card.engine.choice import choose, is_worth_drafting
from card.engine.cores import Home
from card.engine.latency import LatencyFit, PassCost
from card.engine.policy import Draft, Outcome, RoundView, Wait, likely
from card.engine.switch import Arm
from card.nodes import Candidates
from card.offers import leading, select
from card.target import TargetRequest

_ROUND_S, _REQUEST_S = 3e-4, 1e-4  # a round beyond its passes, and each request in it, until it has been measured
_FIRST_AGREEMENT = 0.75  # chance that a candidate below an accepted one is accepted, until it has been measured
_AGREEMENT_PRIOR = 20.0  # candidates that this counts for
_SURVIVAL_WEIGHT = 0.02
_AGREEMENT_KEPT = 0.98  # of it, after each verification
_DRAFTER_YIELD = 0.75  # layers beside the target of which a committed token can come
_MISSED = 0.4  # of the tokens that end a path, how many are in no other path
_MOST_WIDENING = 1.45  # a beam is as wide as makes a drafter pass at most so many times as long
_PATHS_IN_TURNS = 4  # drafted side by side in turns, where target and drafter never agree
_FIRST_CONTEXT_ROWS = 100.0  # of one request, until they have been counted
_ROWS_WEIGHT = 0.05  # of the newest round in their mean
_DEEPEST = 12  # candidates of one request that predictions of a schedule consider
_KEPT = 0.99  # of a rate's tokens and seconds after each round
_MEASURED_AFTER = 12  # rounds after which a rate counts as measured
_BIAS_WEIGHT = 0.3  # of the newest measured / predicted rate
_SETTLING = 4  # rounds after a switch that say nothing
_REVIEW_EVERY = 16  # rounds
_DWELL = 8  # rounds of another batch size before the schedule is reviewed for it: it may pass
_FIRST_TRIAL, _LAST_TRIAL = 96, 4096  # rounds until another schedule is tried: four times as many each time in vain
_UNTRIED_TRIAL = (
    32  # rounds until a schedule is tried that never was: predictions are only as good as start-up was quiet
)
_TRIAL_ROUNDS, _LONG_TRIAL_ROUNDS = 16, 48
_LOOK_AFTER, _HOPELESS = 12, 0.85  # rounds of a trial after which it ends if it is so much slower
_CLOSE = 0.8  # of the present rate: a rival as good as this gets a long trial, which costs little then
_REMEMBERED = 0.93  # of the rounds that a rate was measured in, at each review of another schedule
_KEPT_FOR_TRIAL = 0.25  # of what was measured of it before
# Of the present rate, that a schedule must promise to be tried, if it never was anywhere, and if it was at some batch
# size. To rest is left for a trial whatever was measured.
_WORTH_A_FIRST_TRIAL, _WORTH_A_TRIAL = 0.6, 0.85
_MARGIN = 1.04  # another schedule must be better by this
_MOST_WAITED_LAYERS = 3
_WAIT_LATENCY_S = 3e-4  # from the target's correction to the drafter's next pass and back


@dataclass(frozen=True, slots=True)
class Station:
    """One schedule: where the target computes, and what passes cost there."""

    home: Home
    target: PassCost
    drafter: PassCost | None = None  # None: no drafter runs


@dataclass(slots=True)
class _Rate:
    """Something per something else, fading; committed tokens per second above all."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0  # that it was measured in; fading while others are

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = self.tokens * _KEPT + tokens
        self.seconds = self.seconds * _KEPT + seconds
        self.rounds += 1

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Patience:
    """How long one batch size goes on with its schedule before another one is tried."""

    rounds: int = 0  # since the last trial
    until_trial: int = _FIRST_TRIAL


@dataclass(slots=True)
class _Learnt:
    """What was learnt about one schedule, at any batch size."""

    target: LatencyFit = field(default_factory=LatencyFit)
    drafter: LatencyFit = field(default_factory=LatencyFit)
    bias: float | None = None  # measured / predicted rate; None until it was tried
    trials: int = 0
    rates: dict[int, _Rate] = field(default_factory=dict)  # by batch bucket


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
        self._stations = dict(stations)
        self._draft = draft
        self._pinned = pinned
        self._learnt: dict[Arm, _Learnt] = {arm: _Learnt() for arm in stations}
        self._calibrations = Calibrations()
        self._agreement = [_FIRST_AGREEMENT * _AGREEMENT_PRIOR, _AGREEMENT_PRIOR]  # accepted, could have been
        self._prompt_share = _Rate()  # prompt tokens read for each committed one
        self._rows_per_request = _FIRST_CONTEXT_ROWS
        self._num_requests = 1
        self._rounds_here = 0  # since the last switch
        self._until_review = 0
        self._rounds_undrafted = 0
        self._survival = _FIRST_AGREEMENT  # chance that a path is accepted one layer deeper, in turns
        self._chances_before: list[float] = []
        self._trial_rounds = 0
        self._is_first_trial = False
        self._has_writers = False  # others than the drafter propose candidates
        self._patiences: dict[int, _Patience] = {}  # by batch bucket
        self._depth_before_draft = -1
        self.arm: Arm = max(stations, key=lambda arm: self._predicted(arm, 1))
        self._width, self._lead = self._beam_for(self.arm, 1)
        self.reason = "predicted"

    @property
    def home(self) -> Home:
        """Where the target computes under the present schedule."""
        return self._stations[self.arm].home

    @property
    def stations(self) -> Mapping[Arm, Station]:
        """The schedules to choose from, with latencies as they were measured at start."""
        return dict(self._stations)

    def predicted(self, arm: Arm, num_requests: int = 1, agreement: float | None = None) -> float:
        """Return the tokens/s expected of a schedule, without regard to what it was measured to reach.

        Args:
            agreement: chance in [0, 1] that a candidate below an accepted one is accepted; None: as learnt so far.
        """
        return self._predicted(arm, num_requests, agreement)

    def calibration(self) -> tuple[DepthReport, ...]:
        """Return how often greedy candidates were accepted, by depth."""
        return self._calibrations.of(True).report()

    @property
    def _patience(self) -> _Patience:
        return self._patiences.setdefault(_bucket(self._num_requests), _Patience())

    # ---- between rounds ---------------------------------------------------------------------------------------------

    def begin(self, num_requests: int, available: frozenset[Arm]) -> None:
        """Review the schedule where the batch has changed, now and then, and when its drafter is gone."""
        has_new_bucket = _bucket(num_requests) != _bucket(self._num_requests)
        self._num_requests = num_requests
        self._depth_before_draft = -1
        self._until_review = min(self._until_review - 1, _DWELL if has_new_bucket else _REVIEW_EVERY)
        possible = [arm for arm in self._stations if arm in available]
        is_gone = self.arm not in possible
        if (self._until_review <= 0 or is_gone) and (possible or len(self._stations) > 1):
            self._until_review = _REVIEW_EVERY
            self._review(possible, is_gone)
        if has_new_bucket or self._rounds_here == 0:
            self._width, self._lead = self._beam_for(self.arm, num_requests)

    def beam(self) -> tuple[int, int]:
        """Return the beam's width and lead for this batch; what was set stays as it is."""
        return self._width, self._lead

    def _review(self, possible: Sequence[Arm], is_gone: bool) -> None:
        if not possible:
            self.reason = "no drafter is up"
            return
        for arm, learnt in self._learnt.items():
            if arm != self.arm and (rate := learnt.rates.get(_bucket(self._num_requests))):
                rate.rounds *= _REMEMBERED
        scores = {arm: self._score(arm) for arm in possible}
        best = max(scores, key=lambda arm: scores[arm])
        here = scores.get(self.arm, 0.0)
        if is_gone:
            self._switch(best)
        elif self._trial_rounds:
            is_hopeless = self._rounds_here >= _LOOK_AFTER and here < _HOPELESS * scores[best]
            if self._rounds_here >= self._trial_rounds or is_hopeless:
                self._end_trial(best)
        elif scores[best] > _MARGIN * here and self._rounds_here >= _SETTLING:
            self._switch(best)
        else:
            rivals = [arm for arm in possible if arm != self.arm]
            rivals = [arm for arm in rivals if self.arm == "off" or scores[arm] > self._worth_a_trial(arm) * here]
            untried = [arm for arm in rivals if self._learnt[arm].bias is None]
            rivals = untried or rivals
            if rivals and self._patience.rounds >= (_UNTRIED_TRIAL if untried else self._patience.until_trial):
                self._patience.rounds = 0
                rival = min(rivals, key=lambda arm: self._learnt[arm].trials)
                self._begin_trial(rival, _LONG_TRIAL_ROUNDS if scores[rival] > _CLOSE * here else _TRIAL_ROUNDS)
        self.reason = self._explain(scores)

    def _worth_a_trial(self, arm: Arm) -> float:
        if self._learnt[arm].bias is not None:
            return _WORTH_A_TRIAL
        return 0.0 if arm == "off" and self._has_writers else _WORTH_A_FIRST_TRIAL  # they write on while it rests

    def _begin_trial(self, arm: Arm, num_rounds: int) -> None:
        """Run another schedule for some rounds; what was measured of it before counts little then."""
        learnt = self._learnt[arm]
        learnt.trials += 1
        self._is_first_trial = learnt.bias is None
        if rate := learnt.rates.get(_bucket(self._num_requests)):
            rate.tokens *= _KEPT_FOR_TRIAL
            rate.seconds *= _KEPT_FOR_TRIAL
        self._switch(arm)
        self._trial_rounds, self._until_review = num_rounds, _LOOK_AFTER

    def _end_trial(self, best: Arm) -> None:
        if best == self.arm:
            self._trial_rounds, self._patience.until_trial = 0, _FIRST_TRIAL
            return
        self._switch(best)
        if not self._is_first_trial:
            self._patience.until_trial = min(4 * self._patience.until_trial, _LAST_TRIAL)

    def _switch(self, arm: Arm) -> None:
        if arm != self.arm:
            self.arm = arm
            self._rounds_here = 0
        self._trial_rounds = 0

    def _score(self, arm: Arm) -> float:
        """Return the tokens/s of a schedule with the reading of prompts, which takes longer on fewer cores.

        All schedules read the share of prompts that was seen under any: how many prompts fall into the short time of a
        trial does not decide.
        """
        rate = self._decoding_rate(arm)
        return rate / (1 + rate * self._prompt_share.value * self._prompt_token_s(arm))

    def _prompt_token_s(self, arm: Arm) -> float:
        cost, fit = self._stations[arm].target, self._learnt[arm].target
        return fit.slope * (cost.seconds(64) - cost.seconds(16)) / 48

    def _decoding_rate(self, arm: Arm) -> float:
        """Return the tokens/s of decoding: predicted, and the more it has been tried the more as measured."""
        learnt = self._learnt[arm]
        rate = learnt.rates.get(_bucket(self._num_requests), _Rate())
        predicted = self._predicted(arm, self._num_requests)
        if rate.rounds >= _MEASURED_AFTER:
            now = rate.value / predicted
            learnt.bias = now if learnt.bias is None else learnt.bias + _BIAS_WEIGHT * (now - learnt.bias)
            return rate.value
        share = rate.rounds / _MEASURED_AFTER
        known = (learnt.bias, self._learnt[self.arm].bias, 1.0)  # what delays one schedule delays another, too
        bias = next(one for one in known if one is not None)
        return share * rate.value + (1 - share) * predicted * bias

    def _predicted(self, arm: Arm, num_requests: int, agreement: float | None = None) -> float:
        """Return the expected tokens/s of a schedule at this batch size, at its best number of candidates."""
        station, learnt = self._stations[arm], self._learnt[arm]
        if agreement is None:
            agreement = self._agreement[0] / self._agreement[1]
        overhead_s = _ROUND_S + _REQUEST_S * num_requests
        draft_s = 0.0
        if station.drafter is not None:
            width, _ = self._beam_for(arm, num_requests)
            draft_s = learnt.drafter.seconds(self._pass_s(station.drafter, num_requests * width, num_requests))

        def round_s(depth: int) -> float:
            predicted_s = self._pass_s(station.target, num_requests * (1 + depth), num_requests)
            return learnt.target.seconds(predicted_s) + overhead_s

        best, expected = 0.0, 0.0
        for depth in range(_DEEPEST if arm != "off" else 1):
            expected += agreement**depth
            length, seconds = expected, round_s(depth)
            if arm == "turns":
                seconds += max(depth, 1) * draft_s
            elif arm == "beside" and draft_s > 0:
                length = min(expected, max(1.0, _DRAFTER_YIELD * seconds / draft_s))
                missed = (1 - agreement**depth) * _MISSED  # then the next round has no candidates
                length, seconds = length + missed, seconds + missed * round_s(0)
            best = max(best, num_requests * length / seconds)
        return best

    def _pass_s(self, cost: PassCost, num_tokens: int, num_requests: int) -> float:
        """Return what a pass of so many tokens for so many requests of the present length was measured to cost."""
        return cost.seconds(num_tokens, num_requests, round(num_requests * self._rows_per_request))

    def _beam_for(self, arm: Arm, num_requests: int) -> tuple[int, int]:
        """Return the width that lengthens a drafter pass little, and a lead of a few target passes.

        In turns the target waits for every node: a second path is drafted only for a pair that agrees little.
        """
        draft, station = self._draft, self._stations[arm]
        width, lead = draft.beam_width, draft.lead
        cost = station.drafter
        if cost is None:
            return width, lead
        if "beam_width" not in self._pinned:
            narrow_s = self._pass_s(cost, num_requests, num_requests)
            widths = range(1, draft.beam_width + 1)
            most_s = _MOST_WIDENING * narrow_s
            fits = [w for w in widths if self._pass_s(cost, num_requests * w, num_requests) <= most_s]
            width = max(fits, default=1)
            if arm == "turns":
                width = min(width, 1 + round(_PATHS_IN_TURNS * (1 - self._agreement[0] / self._agreement[1])))
        if "lead" not in self._pinned:
            target_s = self._pass_s(station.target, num_requests * 6, num_requests)
            layers = target_s / max(self._pass_s(cost, num_requests * width, num_requests), 1e-9)
            lead = max(min(6, lead), min(lead, math.ceil(2.5 * layers)))
        return width, lead

    def _explain(self, scores: Mapping[Arm, float]) -> str:
        parts = [f"{score:.0f} tokens/s {'in ' if arm == 'turns' else ''}{arm}" for arm, score in scores.items()]
        return f"expected of {self._num_requests} at once: {', '.join(parts)}"

    # ---- within a round ---------------------------------------------------------------------------------------------

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
            rate=self._rate(),
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
        learnt = self._learnt[self.arm]
        for one in outcome.result.verified:
            if one.offer:
                self._has_writers = self._has_writers or bool(one.offer.writers)
                self._calibrations.observe(one.is_greedy, one.offer, one.accepted)
            if one.num_compared:  # the first candidate alone: that there are deeper ones shows that it was likely
                self._agreement[0] = self._agreement[0] * _AGREEMENT_KEPT + (one.num_agreed > 0)
                self._agreement[1] = self._agreement[1] * _AGREEMENT_KEPT + 1
        if outcome.view.requests:
            self._learn_latencies(outcome)
        self._rounds_here += 1
        self._patience.rounds += 1
        self._rounds_undrafted = 0 if outcome.view.num_passes else self._rounds_undrafted + 1
        self._prompt_share.add(outcome.view.num_prompt_tokens, outcome.num_committed)
        is_mostly_prompts = 2 * outcome.view.num_prompt_tokens > outcome.result.num_tokens
        if self._rounds_here > _SETTLING and not is_mostly_prompts:
            rate = learnt.rates.setdefault(_bucket(self._num_requests), _Rate())
            prompts_s = outcome.view.num_prompt_tokens * self._prompt_token_s(self.arm)
            rate.add(outcome.num_committed, max(outcome.seconds - prompts_s, 0.0))

    def _learn_latencies(self, outcome: Outcome) -> None:
        station, learnt = self._stations[self.arm], self._learnt[self.arm]
        view, num_requests = outcome.view, len(outcome.view.requests)
        predicted_s = station.target.seconds(outcome.result.num_tokens, num_requests, view.num_context_rows)
        learnt.target.observe(predicted_s, outcome.result.busy_s)
        rows = view.num_context_rows / num_requests
        self._rows_per_request += _ROWS_WEIGHT * (rows - self._rows_per_request)
        if station.drafter is None:
            return
        predicted_s = self._pass_s(station.drafter, num_requests * self._width, num_requests)
        if view.num_passes and not view.num_unread:
            learnt.drafter.observe(predicted_s, view.waited_s / view.num_passes)
        elif outcome.drafter_passes and not view.takes_turns:
            learnt.drafter.observe(predicted_s, outcome.drafter_busy_s * num_requests / outcome.drafter_passes)

    def _prepare_turn(self, view: RoundView) -> Draft | None:
        depth = sum(depth for depth, _ in view.best_paths)
        if depth == self._depth_before_draft and view.num_passes > 1:
            return None  # the last pass made nothing deeper
        self._depth_before_draft = depth
        chances = self._path_chances(view)
        if self._rounds_undrafted >= _REVIEW_EVERY and view.num_passes < 2:
            return Draft(1)  # to learn whether it has become worth while
        gains = [chance * self._survival for chance in chances]
        num_requests = len(view.requests)
        seconds = self._seconds(view)
        num_tokens = num_requests + depth + view.num_prompt_tokens
        verify_s = seconds(num_tokens + num_requests) - seconds(num_tokens)
        is_worth = is_worth_drafting(gains, draft_s=self._draft_s(num_requests), verify_s=verify_s, rate=self._rate())
        return Draft(1) if is_worth else None

    def _path_chances(self, view: RoundView) -> list[float]:
        """Return the chance that each best path is accepted to its end; learn by how much a layer lowers it."""
        chances = [
            self._calibration(request).probability(depth, path_logprob) if depth else 1.0
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
        seconds, rate = self._seconds(view), self._rate()
        gains = [self._calibration(request).next_probability(0, 0.0) for request in view.requests]
        agreement = self._agreement[0] / self._agreement[1]
        best_layers, best_value, expected = 0, 0.0, 0.0
        for layers in range(1, _MOST_WAITED_LAYERS + 1):
            expected += sum(gains) * agreement ** (layers - 1)
            verify_s = seconds(num_requests * (1 + layers)) - seconds(num_requests)
            value = expected - rate * (_WAIT_LATENCY_S + layers * layer_s + verify_s)
            if value > best_value:
                best_layers, best_value = layers, value
        longest = 2 * (_WAIT_LATENCY_S + best_layers * layer_s)
        is_short = min(depth for depth, _ in view.best_paths) < best_layers
        return Wait(longest - view.waited_s) if best_layers and is_short and view.waited_s < longest else None

    def _calibration(self, request: TargetRequest) -> Calibration:
        return self._calibrations.of(request.params.temperature == 0.0)

    def _rate(self) -> float:
        rate = self._learnt[self.arm].rates.get(_bucket(self._num_requests), _Rate())
        return rate.value if rate.rounds >= _SETTLING else self._predicted(self.arm, self._num_requests)

    def _draft_s(self, num_requests: int) -> float:
        cost, learnt = self._stations[self.arm].drafter, self._learnt[self.arm]
        if cost is None:
            return 0.0
        return learnt.drafter.seconds(self._pass_s(cost, num_requests * self._width, num_requests))

    def _seconds(self, view: RoundView) -> Callable[[int], float]:
        """Return what a pass of so many tokens takes in this round."""
        cost, fit = self._stations[self.arm].target, self._learnt[self.arm].target
        num_requests, num_rows = len(view.requests), view.num_context_rows
        return lambda num_tokens: fit.seconds(cost.seconds(num_tokens, num_requests, num_rows))


def _bucket(num_requests: int) -> int:
    """Return the class of batch sizes: 1, 2, 3-4, 5-8, 9-16, ..."""
    return max(num_requests - 1, 0).bit_length()
