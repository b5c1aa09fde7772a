"""Choosing the schedule by measured tokens per second, with short trials of the other schedules.

Each schedule has a record of tokens and seconds for each class of batch sizes. A prediction stands in until rounds were
seen. A schedule that does not run teaches nothing, so now and then another one gets a few rounds. Trials may cost
`TRIAL_SHARE` of the time: a schedule expected to be much slower is tried rarely, one nearly as fast often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from card.config import Schedule
from card.engine.policy.acceptance import PRIOR_COUNT
from card.engine.policy.rounds import bucket

# Share of the time that exploring may cost: trials of schedules, and questions to writers that bring nothing. With
# several requests a trial costs half, as it shows as much in less time. Evidence: with 0.02 late drafts are found
# sooner, and cells in which nothing pays lose a further percent.
TRIAL_SHARE = 0.01
# Rounds of a trial. Two rounds of plain decoding suffice. A drafter begins with one layer; as long as it is right it
# gets more rounds, each with twice as many layers.
PLAIN_TRIAL_ROUNDS, MOST_TRIAL_ROUNDS = 2, 8
HYSTERESIS = 1.02  # another schedule must be faster by this factor to replace the present one
REVIEW_ROUNDS = 4  # between two comparisons of the records
_KEPT = 0.97  # weight that one more round leaves to past evidence


@dataclass(slots=True)
class ModeRecord:
    """Gains and costs of one schedule at one class of batch sizes, fading."""

    num_rounds: float = 0.0  # of single requests
    num_tokens: float = 0.0
    num_seen: int = 0  # rounds of single requests, which do not fade
    excess: float = 0.0  # seconds beyond a plain round as measured at start, per request

    def observe(self, num_requests: int, num_tokens: float, excess: float) -> None:
        """Add a round; one over three times as long as others is a hiccup and counts as three times."""
        if self.num_rounds:
            excess = min(excess, 3 * self.excess / self.num_rounds)
        self.fade(_KEPT)
        self.num_rounds += num_requests
        self.num_seen += num_requests
        self.num_tokens += num_tokens
        self.excess += num_requests * excess

    def fade(self, kept: float) -> None:
        """Reduce the weight of past observations."""
        self.num_rounds *= kept
        self.num_tokens *= kept
        self.excess *= kept


@dataclass(slots=True)
class _Place:
    """Records of one class of batch sizes, and the schedule that is best there."""

    best: Schedule
    records: dict[Schedule, ModeRecord] = field(default_factory=dict)
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
        plain_s: Callable[[int], float],
        trial_s: Callable[[int, int], float],
    ) -> None:
        """Begin with the schedule predicted to be the fastest for one request.

        Args:
            predict: tokens of a request in a round of a schedule for so many requests, and seconds of that round, by
                present knowledge.
            plain_s: seconds of a plain round for so many requests as measured at start.
            trial_s: seconds of a round in turns with one layer for so many requests, after so many rounds without any.
        """
        self._all = tuple(schedules)
        self._predict, self._plain_s, self._trial_s = predict, plain_s, trial_s
        self._places: dict[int, _Place] = {}
        self._num_requests = 1
        self._trial_rounds = 0  # so far, of the present trial
        self._since_review = REVIEW_ROUNDS
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
        was_right: bool,
        was_asked: bool = True,
        reading_s: float = 0.0,
        num_rounds: int = 1,
        reads_prompts: bool = False,
    ) -> None:
        """Count a round.

        Args:
            num_requests: the decoding ones; others read their prompts.
            num_tokens: committed by these.
            seconds: of the round.
            was_right: more than half of what was drafted was accepted, or the drafter was still reading.
            was_asked: the drafter was asked to draft, or drafts unasked. A trial waits for a round in which it is.
            reading_s: of these seconds, those in which the drafter read earlier text: a trial pays for them, later
                rounds do not.
            num_rounds: that this observation stands for; tokens and seconds are their mean.
            reads_prompts: the target read prompts too, so the seconds say nothing about other rounds.
        """
        if seconds <= 0.0 or (self.trial_layers is not None and not was_asked):
            return
        here, schedule = self._here, self.schedule
        if not reads_prompts:
            record = here.records.setdefault(schedule, ModeRecord())
            record.observe(num_requests, num_tokens, (seconds - reading_s) / self._plain_s(num_requests))
        self._since_review += num_rounds
        if not self.is_trial:
            here.credit_s += TRIAL_SHARE / min(num_requests, 2) * seconds * num_rounds
            here.rounds += num_rounds
            return
        here.credit_s -= max(0.0, seconds - num_tokens / self.rate)
        is_hopeless = not reads_prompts and seconds - reading_s > 2 * num_tokens / self.rate
        is_over = self.trial_layers is not None and (not was_right or is_hopeless)
        self._trial_rounds += 1
        if is_over or self._trial_rounds >= self._trial_length(schedule):
            self.is_trial, self._since_review = False, REVIEW_ROUNDS

    @property
    def trial_layers(self) -> int | None:
        """Most layers that are drafted in this round of a trial; None sets no limit."""
        return 1 << self._trial_rounds if self.is_trial and self._starts_slowly(self.schedule) else None

    def fade(self, kept: float) -> None:
        """Reduce the weight of the tokens of old texts."""
        for place in self._places.values():
            for record in place.records.values():
                record.fade(kept)

    def rate_of(self, schedule: Schedule) -> float:
        """Return the tokens per second expected of a schedule at the present batch size."""
        record, (tokens, seconds) = self._here.records.get(schedule), self._predict(schedule, self._num_requests)
        if record is not None:
            prior = PRIOR_COUNT**2 / (PRIOR_COUNT + record.num_seen)  # evidence replaces the guess
            tokens = record.num_tokens + prior * tokens
            seconds = record.excess * self._plain_s(self._num_requests) + prior * seconds
        return self._num_requests * tokens / max(seconds, 1e-9)

    def _enter(self, num_requests: int) -> None:
        self._num_requests = num_requests
        place = self._places.get(bucket(num_requests))
        if place is None:
            self._here = self._places[bucket(num_requests)] = _Place(self._all[0])
            self._here.best = max(self._all, key=self.rate_of)
        else:
            self._here = place

    def _review(self, possible: list[Schedule]) -> None:
        """Switch to the best schedule, or begin a trial of another one if there is credit for it."""
        here, self._since_review, self.is_trial = self._here, 0, False  # the drafter of a trial may have gone
        rates = {schedule: self.rate_of(schedule) for schedule in possible}
        first = max(rates, key=lambda schedule: rates[schedule])
        if here.best not in rates or rates[first] > HYSTERESIS * rates[here.best]:
            here.tried_at[here.best], here.best = here.rounds, first
        self._run(here.best)
        self.rate = rates[first]
        self.reason = f"{self._num_requests} at once: " + ", ".join(
            f"{rate:.0f} tokens/s {'in ' if schedule == 'turns' else ''}{schedule}" for schedule, rate in rates.items()
        )
        others = [schedule for schedule in possible if schedule != here.best]
        if not others:
            return
        tried = min(others, key=lambda schedule: here.tried_at.get(schedule, 0))
        num_waited = here.rounds - here.tried_at.get(tried, 0)
        price_s = self._price_s(tried, rates, num_waited)
        # The true cost may differ from the measured one, but not beyond this.
        is_unseen = self._starts_slowly(tried) and tried not in here.records
        is_due = is_unseen and price_s < MOST_TRIAL_ROUNDS * self._num_requests / self.rate
        if num_waited and (is_due or here.credit_s >= price_s):
            self._run(tried)
            self.is_trial, self._trial_rounds, here.tried_at[tried] = True, 0, here.rounds

    def _run(self, schedule: Schedule) -> None:
        if schedule != self.schedule:
            self.schedule = schedule

    def _starts_slowly(self, schedule: Schedule) -> bool:
        """Return whether a trial of a schedule begins with one layer: if nothing is drafted otherwise."""
        return schedule == "turns" and self._here.best == "off"

    def _trial_length(self, schedule: Schedule) -> int:
        return PLAIN_TRIAL_ROUNDS if schedule == "off" else MOST_TRIAL_ROUNDS

    def _price_s(self, schedule: Schedule, rates: Mapping[Schedule, float], num_waited: int) -> float:
        """Return the expected cost in seconds of a trial of a schedule after so many rounds without it."""
        num_requests, rate = self._num_requests, max(rates.values())
        if self._starts_slowly(schedule):
            return self._trial_s(num_requests, num_waited) - num_requests / rate  # a token each, at least
        _, seconds = self._predict(schedule, num_requests)
        return self._trial_length(schedule) * seconds * (1 - rates[schedule] / rate)
