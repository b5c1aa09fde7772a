"""Choosing a schedule: each is the arm of a discounted bandit, and the cost model's prediction is its prior.

What is learnt of a schedule is the logarithm of measured over predicted tokens per second: predictions follow the text
and the machine, so their error changes less than the speed itself. Its estimate is normal: the prior has mean 0 and
`PRIOR_SD`; each round adds what it weighs by `ROUND_SD`; all fades. The schedule is the one with the highest estimate
plus one standard deviation (UCB), so one that may be better is tried. A switch has its price: it is made once the other
schedule would have saved as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from card.policy.cost import DISCOUNT
from card.policy.rounds import Schedule

# Standard deviation of the logarithm of measured over predicted speed, from schedule to schedule. Evidence: the median
# error of predictions is 8 to 11 % (docs/planner.md); 0.1 and 0.12 are alike on the gate.
PRIOR_SD = 0.12
# The same of one request's tokens in one round. Evidence: 0.5, 0.7 and 1 are alike on the gate.
ROUND_SD = 0.7
# Rounds that a switch costs: the drafter that takes over reads the texts first. Evidence: with 1 a cell of the gate
# loses 12 %.
SWITCH_ROUNDS = 2.0
# Rounds between reviews; as many after a switch say nothing of a schedule. Evidence: 2, 4 and 8 are alike on the gate.
REVIEW_ROUNDS = 4


@dataclass(slots=True)
class ScheduleRecord:
    """Promised and measured speed of a schedule at one batch size, fading."""

    given: float = 0.0  # tokens
    promised: float = 0.0  # in the same seconds
    rounds: float = 0.0

    @property
    def log_ratio(self) -> float:
        """The logarithm of what was given over what was promised; 0 if nothing was promised."""
        return math.log(max(self.given, 1e-9) / self.promised) if self.promised else 0.0

    def add(self, other: ScheduleRecord) -> None:
        """Take in another one."""
        self.given += other.given
        self.promised += other.promised
        self.rounds += other.rounds

    def fade(self, kept: float) -> None:
        """Let it count for less."""
        self.given *= kept
        self.promised *= kept
        self.rounds *= kept


class Schedules:
    """Chooses the schedule of each round."""

    def __init__(self, schedules: Iterable[Schedule], predict: Callable[[Schedule, int], float]) -> None:
        """Begin with what is predicted to be the fastest for one request.

        Args:
            predict: tokens per second of a schedule for so many requests, as far as is known now.
        """
        self._all = tuple(schedules)
        self._predict = predict
        self._records: dict[tuple[int, Schedule], ScheduleRecord] = {}  # by batch bucket
        self._num_requests = 1
        self._block = ScheduleRecord()  # since the last review; `promised` holds seconds
        self._since_review = REVIEW_ROUNDS  # rounds
        self._tried: frozenset[Schedule] = frozenset()
        self._saved = 0.0  # rounds that the best other schedule would have saved since it was better
        self.rounds_here = 0  # since the last switch
        self.schedule: Schedule = max(self._all, key=lambda schedule: predict(schedule, 1))
        self.rate = predict(self.schedule, 1)  # tokens that a second can bring
        self.reason = "predicted"

    def begin(
        self,
        num_requests: int,
        available: frozenset[Schedule],
        *,
        has_new_text: bool = False,
        tried: frozenset[Schedule] = frozenset(),
    ) -> None:
        """Review the schedule now and then, where text or batch have changed, and when its drafter is gone.

        Args:
            available: those that can run.
            has_new_text: a request was not in the last round.
            tried: one of these is to run, whatever is expected of it, if any is available; empty: the best one.
        """
        has_tried, begins = self._tried and not tried, tried and not self._tried
        self._tried = tried
        if begins:
            self._doubt()
        is_new = has_tried or has_new_text or bucket(num_requests) != bucket(self._num_requests)
        possible = [schedule for schedule in self._all if schedule in available]
        wanted = [schedule for schedule in possible if schedule in tried] or possible
        is_gone = self.schedule not in wanted and len(self._all) > 1
        if self._since_review < REVIEW_ROUNDS and not is_new and not is_gone:
            return
        num_rounds, self._since_review = self._since_review, 0
        self._close_block()
        self._num_requests = num_requests
        if not possible:
            self.reason = "no drafter is up"
            return
        estimates = {schedule: self.estimate(schedule) for schedule in possible}
        scores = {schedule: sum(estimates[schedule]) for schedule in wanted}
        best = max(scores, key=lambda schedule: scores[schedule])
        others = [score for schedule, score in scores.items() if schedule != self.schedule]
        lead = max(others, default=-math.inf) - scores.get(self.schedule, 0.0)
        self._saved = max(0.0, self._saved + num_rounds * math.expm1(lead))
        if is_gone or has_tried or not self.rounds_here or self._saved > SWITCH_ROUNDS:
            self._switch(best)
        self.rate = math.exp(max(mean for mean, _ in estimates.values()))
        self.reason = self._explain(estimates)

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Count a round of the present schedule.

        Args:
            num_requests: those that decode; others read their prompts.
            num_tokens: that these committed.
            seconds: of the round without those of prompts.
        """
        self.rounds_here += 1
        self._since_review += 1
        if self.rounds_here > REVIEW_ROUNDS and seconds > 0:
            self._block.given += num_tokens
            self._block.promised += seconds * num_requests / self._num_requests
            self._block.rounds += 1

    def estimate(self, schedule: Schedule) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm of a schedule's tokens/s at the present batch size."""
        here, prior_mean, both = bucket(self._num_requests), 0.0, ScheduleRecord()
        if schedule != "off":  # those that draft share what is wrongly expected of the drafter
            for (size, drafting), record in self._records.items():
                if size == here and drafting != "off":
                    both.add(record)
            prior_mean = both.log_ratio * both.rounds / (both.rounds + REVIEW_ROUNDS)
        own = self._records.get((here, schedule), ScheduleRecord())
        prior, seen = 1 / PRIOR_SD**2, own.rounds * self._num_requests / ROUND_SD**2
        mean = (seen * own.log_ratio + prior * prior_mean) / (seen + prior)
        return math.log(self._predict(schedule, self._num_requests)) + mean, (seen + prior) ** -0.5

    def _doubt(self) -> None:
        """Let old rounds that drafted count for little: a few of them may have had bad luck.

        Evidence for 0.3: with 0.1 an adversarial draft model costs 1 % more of plain decoding; with 1 a good one that
        began badly is not taken back within 400 tokens.
        """
        for (_, schedule), record in self._records.items():
            if schedule != "off":
                record.fade(0.3)

    def _close_block(self) -> None:
        """Compare what the last rounds gave with what is predicted of them by now."""
        block, self._block = self._block, ScheduleRecord()
        if not block.rounds:
            return
        for record in self._records.values():
            record.fade(DISCOUNT**block.rounds)
        record = self._records.setdefault((bucket(self._num_requests), self.schedule), ScheduleRecord())
        block.promised *= self._predict(self.schedule, self._num_requests)
        record.add(block)

    def _switch(self, schedule: Schedule) -> None:
        if schedule != self.schedule:
            self.schedule, self.rounds_here = schedule, 0
        self._saved = 0.0

    def _explain(self, estimates: dict[Schedule, tuple[float, float]]) -> str:
        parts = [
            f"{math.exp(mean):.0f} tokens/s {'in ' if schedule == 'turns' else ''}{schedule}"
            for schedule, (mean, _) in estimates.items()
        ]
        return f"expected of {self._num_requests} at once: {', '.join(parts)}"


def bucket(num_requests: int) -> int:
    """Return the class of batch sizes: 1, 2, 3-4, 5-8, 9-16, ..."""
    return max(num_requests - 1, 0).bit_length()
