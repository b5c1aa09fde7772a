"""What each schedule promises: tokens per second from measured latencies and from the acceptance seen on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from card.config import DraftSettings
from card.engine.cores import Home
from card.engine.latency import LatencyFit, PassCost
from card.engine.policy import Outcome, RoundView
from card.transport.switch import Arm
from card.tree.nodes import Candidates
from card.tree.verify import ROOT
from card.workers.offers import DRAFTER
from card.workers.request import Verified

_ROUND_S, _REQUEST_S = 3e-4, 1e-4  # a round beyond its passes, and each request in it; biases know the rest
_BESIDE_S = 3.5e-4  # of such a round, for what a drafter beside the target says and is told
_FIRST_AGREEMENT = 0.75  # chance that a candidate below an accepted one is accepted, until it has been measured
_AGREEMENT_PRIOR = 20.0  # candidates that this counts for
_KEPT = 0.98  # of what was seen of acceptance, after each verification
_KEPT_USUAL = 0.995  # the same over many texts
_NEW_TEXT_COMPARED = 30.0  # candidates that what texts usually showed counts for: answers begin harder than they go on
_GUESSED_ROUNDS = 16  # whose other writers' candidates are remembered
_MOST_GUESSES = 1024  # that are remembered for a review
_NEW_TEXT_ROUNDS = 1.0  # that all these together count for when a new text is alone
_MISSED = 3.2  # times the disagreement: of the tokens that end a path, how many are in no other path of a beam
_MOST_WIDENING = 1.45  # a beam is as wide as makes a drafter pass at most so many times as long
_PATHS_IN_TURNS = 4  # drafted side by side in turns, where target and drafter never agree
_FIRST_CONTEXT_ROWS = 100.0  # of one request, until they have been counted
_ROWS_WEIGHT = 0.05  # of the newest round in their mean
_SEEN_PRIOR = 4.0  # compared candidates that the agreement learnt so far counts for among those of a few rounds
# Steps, at most, that choose for each round the depth which is best at the rate of all (`card.engine.choice`), and the
# relative change of that rate by which a step is the last.
_DINKELBACH_STEPS, _SAME_RATE = 3, 0.03
_MOST_REPEATED = 2.0  # times that one seen round may stand for in a prediction; as often as its inverse at least
_DEEPEST = 16  # candidates of one request that predictions of a schedule consider
_DEPTHS = np.arange(_DEEPEST + 1)
_ROWS_AHEAD = 32  # beyond the candidates asked for, that seconds of passes are looked up for at once

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Station:
    """One schedule: where the target computes, and what passes cost there."""

    home: Home
    target: PassCost
    drafter: PassCost | None = None  # None: no drafter runs


@dataclass(slots=True)
class _Fits:
    """How the latencies of one schedule differ from those measured at start."""

    target: LatencyFit = field(default_factory=LatencyFit)
    drafter: LatencyFit = field(default_factory=LatencyFit)


@dataclass(frozen=True, slots=True)
class Guess:
    """What other writers than the drafter promised without it in one verification, and what that gave."""

    chances: tuple[float, ...] = (0.0,) * _DEEPEST  # [d] that their candidate at depth d + 1 is accepted, in [0, 1]
    num_rows: int = 0  # candidates of theirs, whoever else proposed them
    came_true: tuple[float, ...] = (0.0,) * _DEEPEST  # [d] 1 if their candidate at depth d + 1 was accepted, else 0
    num_given: float = 1.0  # tokens that the verification gave, whoever proposed them
    weight: float = 1.0  # of this round among others

    @classmethod
    def of(cls, offer: Candidates, probs: Sequence[float], accepted: Sequence[int]) -> Guess:
        """Return the guess in an offer whose candidates have these chances, and what came of it.

        Args:
            accepted: indices into the offer.
        """
        num_given = 1.0 + len(accepted)
        if not offer.writers:
            return cls(num_given=num_given)
        best = [0.0] * _DEEPEST
        theirs: list[bool] = []  # of each candidate, whether others propose it and all above it
        for writers, parent, depth, prob in zip(offer.writers, offer.parents, offer.depths, probs, strict=True):
            theirs.append(writers != DRAFTER and (parent == ROOT or theirs[parent]))
            if theirs[-1] and depth <= _DEEPEST:
                best[depth - 1] = max(best[depth - 1], prob)
        others = {offer.depths[idx] for idx in accepted if theirs[idx]}
        came_true = tuple([float(depth in others) for depth in range(1, _DEEPEST + 1)])
        return cls(tuple(best), sum(theirs), came_true, num_given)


class _Rounds:
    """What N rounds were promised by other writers, and what they gave; of several requests the mean."""

    def __init__(self, guesses: Sequence[Guess], num_requests: int) -> None:
        """Take the guesses of these rounds, those of one round after those of another."""
        self._guesses, self._num_requests = guesses, num_requests
        self.chances = self._means([guess.chances for guess in guesses])  # [N, _DEEPEST]
        num_more = np.zeros((len(self.chances), len(_DEPTHS)))
        num_more[:, 1:] = (1 - self.chances).cumsum(axis=1)  # of the drafter: where both are right they are the same
        num_rows = num_more + self._means([[guess.num_rows] for guess in guesses])
        self.num_rows = np.rint(num_rows).astype(int)  # [N, D] candidates, by how many layers are drafted
        self.most_rows = int(self.num_rows.max())
        self.given = num_requests * self._means([[guess.num_given] for guess in guesses])  # [N, 1]
        self.weights = self._means([[guess.weight] for guess in guesses])  # [N, 1]

    def in_hindsight(self) -> _Rounds:
        """Return the same rounds as if it had been known what comes true of other writers' candidates."""
        known = copy(self)
        known.chances = self._means([guess.came_true for guess in self._guesses])
        return known

    def _means(self, values: Sequence[Sequence[float]]) -> _Floats:
        """Return the means over the requests of each round."""
        each = np.array(values, dtype=np.float64)
        if self._num_requests == 1:
            return each
        starts = np.arange(0, len(each), self._num_requests)
        counts = np.diff(starts, append=len(each))[:, None]  # the last round may have lost some
        means: _Floats = np.add.reduceat(each, starts) / counts
        return means


class _Options:
    """What N rounds can give by how deep they draft: D depths, from 0 on."""

    def __init__(self, tokens: _Floats, seconds: _Floats, given: _Floats, weights: _Floats) -> None:
        """Weigh the rounds by the text that they covered.

        Where a round gives less than it gave, more of its kind are needed for the same piece of text.

        Args:
            tokens: [N, D], expected.
            seconds: [N, D].
            given: [N, 1], tokens that these rounds gave, under whatever schedule.
            weights: [N, 1], of these rounds.
        """
        self._tokens, self._seconds = tokens, seconds
        self._times = weights * np.minimum(np.maximum(given / tokens, 1 / _MOST_REPEATED), _MOST_REPEATED)
        self._first = np.arange(0, tokens.size, tokens.shape[1])  # [N] places of depth 0

    def best(self, rate: float) -> npt.NDArray[np.intp]:
        """Return for each round the depth that is best where a second is worth ``rate`` tokens: [N]."""
        best: npt.NDArray[np.intp] = (self._tokens - rate * self._seconds).argmax(axis=1)
        return best

    def rate(self, depths: npt.NDArray[np.intp] | int) -> float:
        """Return the tokens/s over the text that these rounds covered, with so many layers drafted in each."""
        places = self._first + depths
        times = self._times.take(places)
        return float(times.dot(self._tokens.take(places)) / times.dot(self._seconds.take(places)))


@dataclass(slots=True)
class Acceptance:
    """What some verifications showed of the text: how often the drafter was right, and what others promised."""

    num_agreed: int = 0  # candidates of the drafter that were accepted, of those below an accepted one
    num_compared: int = 0
    guesses: list[Guess] = field(default_factory=list)  # one for each of the last verifications

    def observe(self, one: Verified, guess: Guess) -> None:
        """Count a verification."""
        self.num_agreed += one.num_agreed
        self.num_compared += one.num_compared
        self.guesses.append(guess)
        del self.guesses[:-_MOST_GUESSES]  # without its drafter an only schedule is never reviewed


class Forecast:
    """Latencies and acceptance of all schedules, and the speed that follows from them."""

    def __init__(self, stations: Mapping[Arm, Station], draft: DraftSettings, pinned: frozenset[str]) -> None:
        """Start from the latencies of ``stations``; ``draft`` bounds the beams, of which ``pinned`` ones stay."""
        self.stations = dict(stations)
        self._draft = draft
        self._pinned = pinned
        self._fits: dict[Arm, _Fits] = {arm: _Fits() for arm in stations}
        self._agreed = [_FIRST_AGREEMENT * _AGREEMENT_PRIOR, _AGREEMENT_PRIOR]  # accepted, could have been
        self._usual = list(self._agreed)  # the same over many texts
        self._rows_per_request = _FIRST_CONTEXT_ROWS
        self._guesses: list[Guess] = []  # of other writers, in the last rounds; replaced and never changed
        self._compared: tuple[list[Guess], int, _Rounds] = [], 0, _Rounds([Guess()], 1)  # of so many requests
        self._tables: dict[tuple[Arm, int], tuple[npt.NDArray[np.int64], _Floats]] = {}  # tokens, seconds at start
        self._foreseen: dict[Arm, float] = {}  # tokens/s by the last prediction, from which the next one begins
        self._texts: set[int] = set()  # those of the last round
        self.num_texts = 0  # seen so far
        self.has_writers = False  # others than the drafter propose candidates
        self._in_use: Arm | None = None  # the schedule of the last round
        self._read_in: Arm | None = None  # the schedule in turns whose drafter has read the texts
        self._lately = Acceptance()  # since it was taken last

    @property
    def agreement(self) -> float:
        """Chance in [0, 1] that the drafter's candidate below an accepted one is accepted."""
        return self._agreed[0] / self._agreed[1]

    # ---- what is expected -------------------------------------------------------------------------------------------

    def tokens_per_s(
        self, arm: Arm, num_requests: int, agreement: float | None = None, seen: Acceptance | None = None
    ) -> float:
        """Return the expected speed of a schedule at this batch size, at its best number of candidates.

        Args:
            agreement: as the property; None: as learnt so far.
            seen: judge these verifications in hindsight: they draft as was right to expect, and get what came of it;
                None: as learnt so far.
        """
        agreement, guesses = self.agreement if agreement is None else agreement, self._guesses
        if seen is not None and seen.guesses:
            agreement = (seen.num_agreed + _SEEN_PRIOR * agreement) / (seen.num_compared + _SEEN_PRIOR)
            guesses = seen.guesses
        rounds = self._last_rounds(num_requests) if guesses is self._guesses else _Rounds(guesses, num_requests)
        options = self._options(arm, num_requests, agreement, rounds)
        rate = self._foreseen.get(arm) or options.rate(0)
        for _ in range(_DINKELBACH_STEPS):
            rate_before, depths = rate, options.best(rate)
            rate = options.rate(depths)
            if abs(rate - rate_before) < _SAME_RATE * rate:
                break
        self._foreseen[arm] = rate
        if seen is not None and seen.guesses and self.has_writers:
            rate = self._options(arm, num_requests, agreement, rounds.in_hindsight()).rate(depths)
        return rate

    def _last_rounds(self, num_requests: int) -> _Rounds:
        """Return the rounds that are remembered, made once for all schedules that are compared by them."""
        guesses, of_requests, rounds = self._compared
        if guesses is not self._guesses or of_requests != num_requests:
            rounds = _Rounds(self._guesses or [Guess()], num_requests)
            self._compared = self._guesses, num_requests, rounds
        return rounds

    def _options(self, arm: Arm, num_requests: int, agreement: float, rounds: _Rounds) -> _Options:
        """Return what these rounds can give, by how deep they draft."""
        drafts, chances = self.stations[arm].drafter is not None, rounds.chances
        draft_s = self.draft_s(arm, num_requests, self._width(arm, num_requests))
        depths = _DEPTHS if drafts else _DEPTHS[:1]
        num_rows = rounds.num_rows[:, : len(depths)]
        rounds_s = self._rounds_s(arm, num_requests, rounds.most_rows)
        alone, by_drafter = 1 + chances.sum(axis=1, keepdims=True), agreement**depths
        tokens, seconds = np.empty(num_rows.shape), rounds_s[num_rows]
        tokens[:] = alone
        if drafts:
            more = np.maximum(by_drafter[1:] - chances, 0.0).cumsum(axis=1)
            if arm == "beside":
                more *= 1 - _share_overtaken(rounds, rounds_s[num_rows[:, 0]], draft_s)
            tokens[:, 1:] += more
        if arm == "turns":  # what others reach is drafted, too: nobody knows before that it will be right
            seconds += (depths if self.has_writers else np.maximum(depths, 1)) * draft_s
        elif arm == "beside":
            share_missed = min(1.0, _MISSED * (1 - agreement))
            token_s = draft_s + (1 - agreement) * share_missed * seconds  # of drafting, in vain when a tree is lost
            missed = (1 - by_drafter) * share_missed  # the next round has no candidates but others'
            tokens += missed * alone
            seconds += missed * rounds_s[num_rows[:, :1]]
            tokens = np.minimum(tokens, np.maximum(alone, seconds / np.maximum(token_s, 1e-9)))
        return _Options(num_requests * tokens, seconds, rounds.given, rounds.weights)

    def _rounds_s(self, arm: Arm, num_requests: int, most: int) -> npt.NDArray[np.float64]:
        """Return the seconds of rounds with 0, 1, ... ``most`` candidates of each request: [1 + most]."""
        table = self._tables.get((arm, num_requests))
        if table is None or len(table[0]) <= most:
            counts = num_requests * np.arange(1, most + _ROWS_AHEAD)
            table = self._tables[arm, num_requests] = counts, self.stations[arm].target.each(counts, num_requests)
        counts, predicted_s = table[0][: most + 1], table[1][: most + 1]
        base_s, slope, token_s = self._fits[arm].target.plane()
        num_rows = round(num_requests * self._rows_per_request)
        base_s += slope * self.stations[arm].target.per_context_row_s * num_rows
        pass_s = slope * predicted_s + token_s * counts + base_s
        around_s = _ROUND_S + _REQUEST_S * num_requests + (_BESIDE_S if arm == "beside" else 0.0)
        rounds_s: _Floats = np.maximum(pass_s, 0.0) + around_s
        return rounds_s

    def beam(self, arm: Arm, num_requests: int) -> tuple[int, int]:
        """Return the width that lengthens a drafter pass little, and a lead of a few target passes."""
        station, width, lead = self.stations[arm], self._width(arm, num_requests), self._draft.lead
        if station.drafter is not None and "lead" not in self._pinned:
            target_s = self._pass_s(station.target, num_requests * 6, num_requests)
            layers = target_s / max(self._pass_s(station.drafter, num_requests * width, num_requests), 1e-9)
            lead = max(min(6, lead), min(lead, math.ceil(2.5 * layers)))
        return width, lead

    def _width(self, arm: Arm, num_requests: int) -> int:
        """Return the width of a beam.

        In turns the target waits for every node: a second path is drafted only for a pair that agrees little.
        """
        cost, widest = self.stations[arm].drafter, self._draft.beam_width
        if cost is None or "beam_width" in self._pinned:
            return widest
        if arm == "turns":
            widest = min(widest, 1 + round(_PATHS_IN_TURNS * (1 - self.agreement)))
        most_s = _MOST_WIDENING * self._pass_s(cost, num_requests, num_requests)
        widths = range(widest, 1, -1)
        return next((w for w in widths if self._pass_s(cost, num_requests * w, num_requests) <= most_s), 1)

    def draft_s(self, arm: Arm, num_requests: int, width: int) -> float:
        """Return the seconds of a drafter pass for so many beams of this width; 0 where no drafter runs."""
        cost = self.stations[arm].drafter
        if cost is None:
            return 0.0
        predicted_s = self._pass_s(cost, num_requests * width, num_requests)
        fit = self._fits[arm].drafter
        if fit.ratio is None:  # not used yet: what made passes dearer than at start elsewhere will do so here
            return predicted_s * max(fits.drafter.ratio or 1.0 for fits in self._fits.values())
        return fit.seconds(predicted_s)

    def seconds(self, arm: Arm, view: RoundView) -> Callable[[int], float]:
        """Return what a target pass of so many tokens takes in this round."""
        cost, (base_s, slope, token_s) = self.stations[arm].target, self._fits[arm].target.plane()
        num_requests, num_rows = len(view.requests), view.num_context_rows

        def seconds(num_tokens: int) -> float:
            predicted_s = cost.seconds(num_tokens, num_requests, num_rows)
            return max(0.0, base_s + slope * predicted_s + token_s * num_tokens)

        return seconds

    def prompt_token_s(self, arm: Arm) -> float:
        """Return the seconds that each token of a prompt adds to a pass."""
        cost = self.stations[arm].target
        return (self._fits[arm].target.ratio or 1.0) * (cost.seconds(64) - cost.seconds(16)) / 48

    def _pass_s(self, cost: PassCost, num_tokens: int, num_requests: int) -> float:
        """Return what a pass of so many tokens for so many requests of the present length was measured to cost."""
        return cost.seconds(num_tokens, num_requests, round(num_requests * self._rows_per_request))

    # ---- what was seen ----------------------------------------------------------------------------------------------

    def observe(self, arm: Arm, width: int, outcome: Outcome, guesses: Sequence[Guess]) -> None:
        """Learn acceptance and latencies from a round under this schedule, with beams of this width.

        Args:
            guesses: one for each verification.
        """
        self._notice_new_texts(outcome)
        for one, guess in zip(outcome.result.verified, guesses, strict=True):
            self._lately.observe(one, guess)
            self.has_writers = self.has_writers or bool(one.offer.writers)
            if one.num_compared:
                for kept, seen in ((_KEPT, self._agreed), (_KEPT_USUAL, self._usual)):
                    seen[0] = seen[0] * kept + one.num_agreed
                    seen[1] = seen[1] * kept + one.num_compared
        if self.has_writers:
            self._guesses = [*self._guesses, *guesses][-_GUESSED_ROUNDS * max(1, len(guesses)) :]
        if outcome.view.requests:
            self._observe_latencies(arm, width, outcome)

    def take_lately(self) -> Acceptance:
        """Return what was seen since this was called last."""
        lately, self._lately = self._lately, Acceptance()
        return lately

    def _notice_new_texts(self, outcome: Outcome) -> None:
        """Let what was seen of other texts count less where new ones make up much of the batch."""
        texts = {request.request_id for request in outcome.view.requests}
        if new := texts - self._texts:
            self.num_texts += len(new)
            kept = 1 - len(new) / len(texts)
            total = sum(guess.weight for guess in self._guesses)
            share = min(1.0, max(kept, _NEW_TEXT_ROUNDS / max(total, 1.0)))
            self._guesses = [replace(guess, weight=share * guess.weight) for guess in self._guesses]
            count = max(_NEW_TEXT_COMPARED, kept * self._agreed[1])
            agreement = kept * self.agreement + (1 - kept) * self._usual[0] / self._usual[1]  # it may have rested since
            self._agreed = [agreement * count, count]
        self._texts = texts

    def _observe_latencies(self, arm: Arm, width: int, outcome: Outcome) -> None:
        station, fits = self.stations[arm], self._fits[arm]
        view, num_requests = outcome.view, len(outcome.view.requests)
        if arm != self._in_use:  # what differs from expectation now is this schedule's own, and not the machine's speed
            self._in_use = arm
            fits.target.resume()
            fits.drafter.resume()
        predicted_s = station.target.seconds(outcome.result.num_tokens, num_requests, view.num_context_rows)
        ratio_before = fits.target.ratio
        fits.target.observe(predicted_s, outcome.result.busy_s, outcome.result.num_tokens)
        if ratio_before and fits.target.ratio and fits.target.is_settled:
            for other in self._fits.values():  # were seen last when the machine was as fast as it was before
                if other is not fits:
                    other.target.scale(fits.target.ratio / ratio_before)
                    other.drafter.scale(fits.target.ratio / ratio_before)
        rows = view.num_context_rows / num_requests
        self._rows_per_request += _ROWS_WEIGHT * (rows - self._rows_per_request)
        has_read = self._read_in == arm and not view.num_unread  # a drafter that takes over reads all texts at first
        if view.num_passes or arm != self._read_in:
            self._read_in = arm if view.num_passes else None
        if station.drafter is None:
            return
        predicted_s = self._pass_s(station.drafter, num_requests * width, num_requests)
        if view.num_passes and has_read:
            fits.drafter.observe(predicted_s, view.waited_s / view.num_passes)
        elif outcome.drafter_passes and not view.takes_turns:
            fits.drafter.observe(predicted_s, outcome.drafter_busy_s * num_requests / outcome.drafter_passes)


def _share_overtaken(rounds: _Rounds, seconds: _Floats, draft_s: float) -> float:
    """Return in how many rounds others reach beyond what a drafter makes meanwhile: it has no tree in the next one.

    Args:
        seconds: [N], of these rounds.
    """
    weights = rounds.weights[:, 0] / rounds.weights.sum()
    num_layers = int(min(weights.dot(seconds) / max(draft_s, 1e-9), _DEEPEST - 1))
    return float(weights.dot(rounds.chances[:, num_layers]))
