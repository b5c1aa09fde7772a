"""Choosing the schedule by the tokens per second that each one promises, with short trials of those that draft.

What plain decoding brings is computed: one token a request and what other writers have right, in the seconds that
passes take. What drafts bring is unknown until rounds were seen. So a schedule that drafts promises what costs and
agreement predict, corrected by what its rounds came to. Where it does not run it teaches nothing, so now and then it
gets a few rounds. Trials may cost `TRIAL_SHARE` of the time: a schedule expected to be much slower is tried rarely, one
nearly as fast often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from card.config import Schedule
from card.engine.policy.acceptance import PRIOR_COUNT
from card.engine.policy.rounds import bucket

# Share of the time that exploring may cost: trials of schedules, and questions to writers that bring nothing. With
# several requests a trial costs half, as it shows as much in less time. Evidence: with 0.02 late drafts are found
# sooner, and cells in which nothing pays lose a further percent.
TRIAL_SHARE = 0.01
# Rounds of a trial. A drafter begins with one layer; as long as it is right it gets more rounds, each with twice as
# many layers.
MOST_TRIAL_ROUNDS = 8
HYSTERESIS = 1.02  # another schedule must be faster by this factor to replace the present one
REVIEW_ROUNDS = 4  # between two comparisons of the schedules
_KEPT = 0.97  # weight that one more round leaves to past evidence


@dataclass(slots=True)
class ModeRecord:
    """Outcome of the rounds of one schedule over the predictions for them; fading."""

    num_rounds: float = 0.0  # of single requests
    tokens: float = 0.0  # of each round over those predicted, added up
    seconds: float = 0.0

    def observe(self, num_requests: int, tokens: float, seconds: float) -> None:
        """Add a round; one over three times as long as others is a hiccup and counts as three times."""
        if self.num_rounds:
            seconds = min(seconds, 3 * self.seconds / self.num_rounds)
        self.fade(_KEPT)
        self.num_rounds += num_requests
        self.tokens += num_requests * tokens
        self.seconds += num_requests * seconds

    def fade(self, kept: float) -> None:
        """Reduce the weight of past observations."""
        self.num_rounds *= kept
        self.tokens *= kept
        self.seconds *= kept

    @property
    def gain(self) -> float:
        """The rate reached over the rate predicted; the first rounds count as if they had come to what was said."""
        return (self.tokens + PRIOR_COUNT) / (self.seconds + PRIOR_COUNT)


@dataclass(slots=True)
class _Place:
    """Knowledge of one class of batch sizes, and the schedule that is best there."""

    best: Schedule
    records: dict[Schedule, ModeRecord] = field(default_factory=dict)  # of the schedules that draft
    tried_at: dict[Schedule, int] = field(default_factory=dict)  # round
    rounds: int = 0  # without trials
    credit_s: float = 0.0  # seconds that trials may cost now


class Modes:
    """Chooses the schedule of each round."""

    def __init__(
        self,
        schedules: Iterable[Schedule],
        predict: Callable[[Schedule, int], tuple[float, float]],
        *,
        hope: Callable[[Schedule, int], tuple[float, float]] | None = None,
        trial_s: Callable[[int], float],
    ) -> None:
        """Begin with the schedule predicted to be the fastest for one request.

        Args:
            predict: tokens of a request in a round of a schedule for so many requests, and seconds of that round, by
                present knowledge.
            hope: the same by what may well be true while little is known, for the choice; None: no better.
            trial_s: seconds of a round in turns with one layer for one of so many requests, its reading included.
        """
        self._all = tuple(schedules)
        self._predict, self._hope, self._trial_s = predict, hope or predict, trial_s
        self._places: dict[int, _Place] = {}
        self._num_requests = 1
        self._trial_rounds = 0  # so far, of the present trial
        self._since_review = REVIEW_ROUNDS
        self._num_idle = 0  # rounds since a drafter was last asked, under a schedule that drafts
        self.is_trial = False
        self._enter(1)
        self.schedule: Schedule = self._here.best
        self.rate = self.rate_of(self.schedule)  # tokens that a second brings at the present batch size
        self.reason = "predicted"

    def begin(self, num_requests: int, available: frozenset[Schedule], *, has_new_text: bool = False) -> None:
        """Choose the schedule of a round.

        Args:
            num_requests: running requests, prompts included.
            available: the schedules that can run.
            has_new_text: a request was not in the last round.
        """
        is_same = num_requests == self._num_requests and self.schedule in available and not has_new_text
        if is_same and (self.is_trial or self._since_review < REVIEW_ROUNDS):
            return
        if bucket(num_requests) != bucket(self._num_requests):
            self.is_trial, self._since_review = False, REVIEW_ROUNDS
        self._enter(num_requests)
        possible = [schedule for schedule in self._all if schedule in available]
        if not possible:
            self.reason = "no drafter is up"
            return
        if has_new_text:
            self._since_review = REVIEW_ROUNDS
        if self.is_trial and self.schedule in possible:
            return
        if self._since_review >= REVIEW_ROUNDS or self.schedule not in possible:
            self._review(possible)

    def observe(
        self,
        num_requests: int,
        num_tokens: float,
        seconds: float,
        *,
        was_asked: bool = True,
        num_agreed: int = 0,
        num_compared: int = 0,
        is_reading: bool = False,
        drafting_s: float = 0.0,
        reads_prompts: bool = False,
        num_drafting: int = 0,
    ) -> None:
        """Count a round.

        Args:
            num_requests: the decoding ones; others read their prompts.
            num_tokens: committed by these.
            seconds: of the round.
            was_asked: the drafter was asked to draft, or drafts unasked. A trial waits for a round in which it is.
            num_agreed, num_compared: of the drafter's candidates, those that were right and those that were looked at.
            is_reading: the drafter read earlier text. A trial pays for that, and goes on behind it.
            drafting_s: of these seconds, those in which only the drafter worked.
            reads_prompts: the target read prompts too, so the seconds say nothing about other rounds.
            num_drafting: requests that got drafts, or need none.
        """
        layers = self.trial_layers
        if seconds <= 0.0 or (layers is not None and not was_asked):
            return
        here = self._here
        self._since_review += 1
        self._num_idle = 0 if was_asked or self.schedule == "off" else self._num_idle + 1
        is_whole = was_asked and num_drafting >= num_requests and not (reads_prompts or is_reading)
        if self.schedule != "off" and layers is None and is_whole:
            tokens, expected_s = self._predict(self.schedule, num_requests)
            record = here.records.setdefault(self.schedule, ModeRecord())
            record.observe(num_requests, num_tokens / (num_requests * tokens), seconds / expected_s)
        if not self.is_trial:
            here.credit_s += TRIAL_SHARE / min(num_requests, 2) * seconds
            here.rounds += 1
            return
        here.credit_s -= drafting_s if reads_prompts else max(0.0, seconds - num_tokens / self.rate)
        if is_reading:
            return
        self._trial_rounds += 1
        is_slow = not reads_prompts and seconds > 2 * num_tokens / self.rate
        is_wrong = 2 * num_agreed <= num_compared
        is_over = layers is not None and (is_wrong or is_slow)
        if is_over or self._trial_rounds >= MOST_TRIAL_ROUNDS:
            self.is_trial, self._since_review = False, REVIEW_ROUNDS

    @property
    def trial_layers(self) -> int | None:
        """Most layers that are drafted in this round of a trial; None sets no limit."""
        return 1 << self._trial_rounds if self.is_trial and self._starts_slowly(self.schedule) else None

    def fade(self, kept: float) -> None:
        """Reduce the weight of what old texts came to."""
        for place in self._places.values():
            for record in place.records.values():
                record.fade(kept)

    def rate_of(self, schedule: Schedule, *, is_hoped: bool = False) -> float:
        """Return the tokens per second expected of a schedule, or hoped for, at the present batch size."""
        tokens, seconds = (self._hope if is_hoped else self._predict)(schedule, self._num_requests)
        record = self._here.records.get(schedule)
        return self._num_requests * tokens / max(seconds, 1e-9) * (record.gain if record else 1.0)

    def saved_s(self, schedule: Schedule) -> float:
        """Return the seconds that each token takes less under a schedule than where nothing is drafted."""
        if "off" not in self._all:
            return math.inf
        plain, hoped = (self.rate_of(one, is_hoped=True) for one in ("off", schedule))
        return 1 / max(plain, 1e-9) - 1 / max(hoped, 1e-9)

    def _enter(self, num_requests: int) -> None:
        self._num_requests = num_requests
        place = self._places.get(bucket(num_requests))
        if place is None:
            self._here = self._places[bucket(num_requests)] = _Place(self._all[0])
            self._here.best = max(self._all, key=lambda schedule: self.rate_of(schedule, is_hoped=True))
        else:
            self._here = place

    def _review(self, possible: list[Schedule]) -> None:
        """Switch to the best schedule, or begin a trial of another one if there is credit for it."""
        here, self._since_review, self.is_trial = self._here, 0, False  # the drafter of a trial may have gone
        rates = {schedule: self.rate_of(schedule, is_hoped=True) for schedule in possible}
        first = max(rates, key=lambda schedule: rates[schedule])
        if here.best not in rates or rates[first] > HYSTERESIS * rates[here.best]:
            here.tried_at[here.best], here.best = here.rounds, first
        elif self._num_idle >= REVIEW_ROUNDS and "off" in possible:  # it drafts nothing, and so teaches nothing
            here.tried_at[here.best], here.best, self._num_idle = here.rounds, "off", 0
        self.schedule, self.rate = here.best, self.rate_of(first)
        self.reason = f"{self._num_requests} at once: " + ", ".join(
            f"{rate:.0f} tokens/s {'in ' if schedule == 'turns' else ''}{schedule}" for schedule, rate in rates.items()
        )
        others = [schedule for schedule in possible if schedule not in (here.best, "off")]
        if not others:
            return
        tried = min(others, key=lambda schedule: here.tried_at.get(schedule, 0))
        price_s = self._price_s(tried, rates)
        # The true cost may differ from the measured one, but not beyond this.
        is_unseen = self._starts_slowly(tried) and tried not in here.tried_at
        is_due = is_unseen and price_s < MOST_TRIAL_ROUNDS * self._num_requests / self.rate
        if here.rounds > here.tried_at.get(tried, 0) and (is_due or here.credit_s >= price_s):
            self.schedule = tried
            self.is_trial, self._trial_rounds, here.tried_at[tried] = True, 0, here.rounds

    def _starts_slowly(self, schedule: Schedule) -> bool:
        """Return whether a trial of a schedule begins with one layer: if nothing is drafted otherwise."""
        return schedule == "turns" and self._here.best == "off"

    def _price_s(self, schedule: Schedule, rates: Mapping[Schedule, float]) -> float:
        """Return the expected cost in seconds of a trial of a schedule."""
        num_requests, rate = self._num_requests, max(rates.values())
        if self._starts_slowly(schedule):
            return self._trial_s(num_requests) - num_requests / rate  # a token each, at least
        _, seconds = self._predict(schedule, num_requests)
        return MOST_TRIAL_ROUNDS * seconds * (1 - rates[schedule] / rate)
