"""Choosing the schedule by the tokens per second that each one promises, with short trials of those that draft.

What plain decoding brings is computed: one token a request and what other writers have right, in the seconds that
passes take. What drafts bring is unknown until rounds were seen. So a schedule that drafts promises what costs and
agreement predict, corrected by what its rounds came to. Where it does not run it teaches nothing, so now and then it
gets a few rounds. Trials may cost `TRIAL_SHARE` of the time: a schedule expected to be much slower is tried rarely, one
nearly as fast often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from card.config import Schedule
from card.engine.policy.acceptance import PRIOR_COUNT
from card.engine.policy.rounds import bucket

# Share of the time that exploring may cost: trials of schedules, and questions to writers that bring nothing. With
# several requests a trial costs half, as it shows as much in less time. Evidence: with 0.02 late drafts are found
# sooner, and cells in which nothing pays lose a further percent.
TRIAL_SHARE = 0.01
HYSTERESIS = 1.02  # another schedule must be faster by this factor to replace the present one
REVIEW_ROUNDS = 4  # between two comparisons of the schedules, and of a trial
_KEPT = 0.97  # weight that one more round leaves to past evidence


@dataclass(slots=True)
class ModeRecord:
    """Outcome of the rounds of one schedule over the predictions for them; fading.

    The first rounds are made up, and came to what was predicted.
    """

    num_rounds: float = PRIOR_COUNT  # of single requests
    tokens: float = PRIOR_COUNT  # of each round over those predicted, added up
    seconds: float = PRIOR_COUNT

    def observe(self, num_requests: int, tokens: float, seconds: float) -> None:
        """Add a round; one over three times as long as others is a hiccup and counts as three times."""
        seconds = min(seconds, 3 * self.seconds / self.num_rounds)
        self.num_rounds = _KEPT * self.num_rounds + num_requests
        self.tokens = _KEPT * self.tokens + num_requests * tokens
        self.seconds = _KEPT * self.seconds + num_requests * seconds

    @property
    def gain(self) -> float:
        """The rate reached over the rate predicted."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class _Place:
    """Knowledge of one class of batch sizes, and the schedule that is best there."""

    best: Schedule
    records: dict[Schedule, ModeRecord] = field(default_factory=dict)  # of the schedules that draft
    tried: Schedule | None = None  # last


class Modes:
    """Chooses the schedule of each round."""

    def __init__(
        self,
        schedules: Iterable[Schedule],
        predict: Callable[[Schedule, int, int | None, bool], tuple[float, float]],
        *,
        reading_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Begin with the schedule predicted to be the fastest for one request.

        Args:
            predict: tokens of a request in a round of a schedule for so many requests, of which so many get drafts
                (None: all that want them), and seconds of that round: by present knowledge, or if the last argument
                is true by what may well be while little is known.
            reading_s: seconds of reading before a drafter in turns can draft for a request.
        """
        self._all = tuple(schedules)
        self._predict, self._reading_s = predict, reading_s
        self._places: dict[int, _Place] = {}
        self._num_requests, self._since_review = 1, REVIEW_ROUNDS
        self._num_idle = 0  # rounds since the drafter was last asked
        self._reads_prompts, self.is_trial = True, False  # the first prompt is not read yet
        self._enter(1)
        self.schedule: Schedule = self._here.best
        self.rate = self.rate_of(self.schedule, is_hoped=False)  # tokens that a second brings at the present batch size
        self._credit_s = REVIEW_ROUNDS / self.rate  # seconds that trials may cost now; these are for a first one
        self.reason = "predicted"

    def begin(self, num_requests: int, available: frozenset[Schedule], *, has_new_text: bool = False) -> None:
        """Choose the schedule of a round.

        Args:
            num_requests: running requests, prompts included.
            available: the schedules that can run.
            has_new_text: a request was not in the last round.
        """
        possible = [schedule for schedule in self._all if schedule in available]
        is_due = self._enter(num_requests) or self._since_review >= REVIEW_ROUNDS or self.schedule not in possible
        if not possible:
            self.reason = "no drafter is up"
        elif is_due or (has_new_text and not self.is_trial):
            self._review(possible)

    def observe(
        self,
        num_requests: int,
        num_tokens: float,
        seconds: float,
        *,
        num_drafting: int | None = None,
        is_reading: bool = False,
        reads_prompts: bool = False,
    ) -> None:
        """Count a round.

        Args:
            num_requests: the decoding ones; others read their prompts.
            num_tokens: committed by these.
            seconds: of the round.
            num_drafting: requests that got drafts; None: the drafter drafts unasked.
            is_reading: the drafter read earlier text. A trial pays for that, and goes on behind it.
            reads_prompts: the target read prompts too, so the seconds say nothing about other rounds.
        """
        if seconds <= 0.0:
            return
        here, self._reads_prompts = self._here, reads_prompts
        self._credit_s += TRIAL_SHARE / min(num_requests, 2) * seconds
        if self.schedule != "off" and num_drafting != 0 and not (reads_prompts or is_reading):
            tokens, expected_s = self._predict(self.schedule, num_requests, num_drafting, False)
            record = here.records.setdefault(self.schedule, ModeRecord())
            record.observe(num_requests, num_tokens / (num_requests * tokens), seconds / expected_s)
        if self.is_trial and not reads_prompts:
            self._credit_s -= max(0.0, seconds - num_tokens / self.rate)
        self._num_idle = self._num_idle + 1 if num_drafting == 0 else 0
        if not (self.is_trial and is_reading):
            self._since_review += 1

    def rate_of(self, schedule: Schedule, num_drafting: int | None = None, *, is_hoped: bool = True) -> float:
        """Return the tokens per second hoped for of a schedule, or expected, at the present batch size."""
        tokens, seconds = self._predict(schedule, self._num_requests, num_drafting, is_hoped)
        record = self._here.records.get(schedule)
        return self._num_requests * tokens / max(seconds, 1e-9) * (record.gain if record else 1.0)

    def saved_s(self, schedule: Schedule) -> float:
        """Return the seconds that each token takes less under a schedule than where nothing is drafted."""
        return 1 / max(self.rate_of("off"), 1e-9) - 1 / max(self.rate_of(schedule), 1e-9)

    def _enter(self, num_requests: int) -> bool:
        """Go to the class of a batch size. Returns: whether it is another one."""
        size, is_other = bucket(num_requests), bucket(num_requests) != bucket(self._num_requests)
        self._num_requests, self._num_idle = num_requests, 0 if is_other else self._num_idle
        if size not in self._places:
            self._here = self._places[size] = _Place(self._all[0])
            self._here.best = max(self._all, key=self.rate_of)
        self._here = self._places[size]
        return is_other

    def _review(self, possible: list[Schedule]) -> None:
        """Switch to the best schedule, or begin a trial of another one if there is credit for it."""
        here, may_try = self._here, not (self.is_trial or self._reads_prompts)
        before, self._since_review, self.is_trial = here.best, 0, False
        rates = {schedule: self.rate_of(schedule) for schedule in possible}
        first = max(rates, key=lambda schedule: rates[schedule])
        if here.best not in rates or rates[first] > HYSTERESIS * rates[here.best]:
            here.best, self._num_idle = first, 0
        elif "off" in rates and self._num_idle >= REVIEW_ROUNDS:
            here.best = "off"  # a drafter that drafts nothing shows nothing
        self.schedule, self.rate = here.best, self.rate_of(first, is_hoped=False)
        self.reason = f"{self._num_requests} at once: " + ", ".join(
            f"{rate:.0f} tokens/s {'in ' if schedule == 'turns' else ''}{schedule}" for schedule, rate in rates.items()
        )
        others = [schedule for schedule in possible if schedule not in (here.best, "off")]
        if not (others and may_try and here.best == before):
            return
        tried = min(others, key=lambda schedule: schedule == here.tried)
        if self._credit_s >= self._price_s(tried):
            self.schedule = here.tried = tried
            self.is_trial = True

    def _price_s(self, schedule: Schedule) -> float:
        """Return the expected cost in seconds of a trial of a schedule; in turns one request gets drafts."""
        reading_s, num_drafting = (self._reading_s(), 1) if schedule == "turns" else (0.0, None)
        tokens, seconds = self._predict(schedule, self._num_requests, num_drafting, False)
        return reading_s + REVIEW_ROUNDS * (seconds - self._num_requests * tokens / self.rate)
