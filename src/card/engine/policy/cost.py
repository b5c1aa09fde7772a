"""Cost of a round: passes as measured at start, corrected by a running ratio for each schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from card.config import Schedule
from card.engine.policy.rounds import Outcome, RoundView, ScheduleCost, bucket
from card.engine.request import StepResult
from card.machine.expert_cost import ExpertUse

# Weight that one more round leaves to past evidence: a memory of about 300 rounds, for everything learnt. Evidence:
# with 0.99, 0.997 and 0.998 the gate's mean is the same to 1 %.
DISCOUNT = 0.997
# Seconds of Python around a round before any was measured: a fifth of it for each further request, as much again with
# a drafter, and as much around each of its layers. Evidence: 0.15 ms around a plain round, 0.43 with 16.
ROUND_S = 1.5e-4
# Seconds of Python to ask the writers for one request, and to verify candidates of one request. Evidence: 54 and 65 us
# (Zen 4).
REQUEST_S = 8e-5
_CHUNK = 64  # tokens of a prompt whose pass takes as long a token as longer ones; also rows by which contexts differ


@dataclass(slots=True)
class Ratio:
    """Measured over predicted seconds, fading; 1 before any measurement."""

    measured_s: float = 0.0
    predicted_s: float = 0.0
    most_at_first: float = math.inf  # bound on the first measured ratio; none where the prediction is a guess

    @property
    def value(self) -> float:
        """The ratio."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0

    def blend(self, other: float, weight_s: float) -> float:
        """Return the ratio as if another one had been seen before, over so many predicted seconds."""
        return (self.measured_s + weight_s * other) / (self.predicted_s + weight_s)

    def observe(self, measured_s: float, predicted_s: float) -> None:
        """Add one pass; more than twice the expected time is a hiccup of the machine and counts as twice."""
        if measured_s > 0 and predicted_s > 0:
            most_s = predicted_s * (2 * self.value if self.predicted_s else self.most_at_first)
            self.measured_s = DISCOUNT * self.measured_s + min(measured_s, most_s)
            self.predicted_s = DISCOUNT * self.predicted_s + predicted_s


class PromptCost:
    """Seconds of a row of a long pass, and of each row of context with it, from the prompts read; fading.

    Rows that verify candidates compute with all of the context, as those of a prompt do. A pass of one row does not
    show that, as it waits for memory. Evidence: behind 5,000 tokens a pass of 16 rows takes 145 ms and one of a single
    row 56, behind 100 tokens 82 and 44: 0.7 us for each pair, where prompts say 0.75 (Qwen2.5-Coder 1.5 B, Q4_K_M, Xeon
    with AVX-512).
    """

    def __init__(self) -> None:
        self.row_s = 0.0  # of a row without context; 0 until a prompt was read
        self.pair_s = 0.0  # of a row and one of its context; 0 while all contexts were about as long
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, x, y, x * x and x * y

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Add a pass that only read so many tokens of prompts, with so many pairs of a token and an earlier row.

        Args:
            seconds: beyond those of a pass of one row.
        """
        if num_tokens < _CHUNK:
            return
        x, y = num_pairs / num_tokens, seconds / num_tokens
        self._sums = tuple(DISCOUNT * old + new for old, new in zip(self._sums, (1, x, y, x * x, x * y), strict=True))
        num, xs, ys, xxs, xys = self._sums
        spread = num * xxs - xs * xs
        self.pair_s = max(0.0, num * xys - xs * ys) / spread if spread > (num * _CHUNK) ** 2 else 0.0
        self.row_s = max(0.0, ys - self.pair_s * xs) / num


class Costs:
    """Seconds of passes and rounds under each schedule, as the machine takes them now.

    Each class of rows has its own ratio: on a busy machine passes of many rows slow down more than those of few.
    """

    def __init__(self, at_start: Mapping[Schedule, ScheduleCost]) -> None:
        """Begin with what was measured at start."""
        self.at_start = dict(at_start)
        self._target: dict[tuple[bool, int], Ratio] = {}  # by whether the drafter runs at the same time, and by rows
        self._layers: dict[Schedule, Ratio] = {}
        self._first_layer = Ratio()  # of a turn, after a target pass: the weights have left the caches
        self._around: dict[bool, Ratio] = {}  # by whether a drafter runs
        self.rows = 0.0  # context of one request in this round
        self._prompts = PromptCost()
        counts = next(iter(self.at_start.values())).target.experts
        self._use = None if counts is None else ExpertUse(counts, kept=DISCOUNT)

    @property
    def has_experts(self) -> bool:
        """True if rows cost what their experts cost: the first rows of a pass more than later ones."""
        return self._use is not None

    def drafts(self, schedule: Schedule) -> bool:
        """Return whether a drafter runs under a schedule."""
        return self.at_start[schedule].drafter is not None

    def pass_s(self, schedule: Schedule, num_tokens: float, num_requests: int) -> float:
        """Return the seconds of a target pass of so many tokens for requests of the present length."""
        return self._predicted_s(schedule, num_tokens, num_requests) * self._ratio_of(schedule, num_tokens)

    def pass_of(self, schedule: Schedule, view: RoundView) -> Callable[[int], float]:
        """Return the seconds of a target pass in this round as a function of its tokens.

        Candidates may fill a further class of rows, whose passes take as long as they were seen to take: at start few
        sizes are measured, and a line through them misses the price of a further tile. A hiccup in the first one must
        not end drafting.
        """
        num_requests = len(view.requests)
        self.rows = view.num_context_rows / num_requests
        plain = self._ratio_of(schedule, num_requests)

        def seconds(num_tokens: int) -> float:
            predicted_s = self._predicted_s(schedule, num_tokens, num_requests)
            seen = self._target.get((schedule == "beside", bucket(num_tokens)))
            return predicted_s * (seen.blend(plain, predicted_s) if seen else plain)

        least_s = seconds(num_requests)
        return lambda num_tokens: max(least_s, seconds(num_tokens))

    def row_s(self, schedule: Schedule, num_tokens: int, num_requests: int) -> float:
        """Return the seconds that one more row adds to a target pass of so many tokens: the mean of its class.

        With experts the mean of as many rows as there are requests: the later ones find more experts read already.
        """
        if self.has_experts:
            longer = num_tokens + num_requests
            more_s = self._predicted_s(schedule, longer, num_requests)
            more_s -= self._predicted_s(schedule, num_tokens, num_requests)
            return self._ratio_of(schedule, longer) * more_s / num_requests
        most = 1 << bucket(num_tokens + 1)
        least = max(1, most // 2)
        more_s = self.pass_s(schedule, most, num_requests) - self.pass_s(schedule, least, num_requests)
        return max(0.0, more_s) / max(1, most - least)

    def draft_s(self, schedule: Schedule, num_requests: int, width: int = 1) -> float:
        """Return the seconds of a drafter pass for so many beams of this width; 0 where no drafter runs."""
        ratio = self._layers.get(schedule)
        value = ratio.value if ratio else min(1.0, self._first_layer.value)  # a further layer takes no longer
        return self._layer_s(schedule, num_requests, width) * value

    def first_draft_s(self, schedule: Schedule, num_requests: int) -> float:
        """Return the same for the first pass of a turn. Evidence: 0.9 ms, where each further one takes 0.45."""
        if self._first_layer.predicted_s:
            return self._first_layer.value * self._layer_s(schedule, num_requests, 1)
        return self.draft_s(schedule, num_requests) + 3 * ROUND_S

    def reading_s(self, schedule: Schedule, num_tokens: int) -> float:
        """Return the seconds in which the drafter reads so many tokens of a text."""
        cost = self.at_start[schedule].drafter
        return cost.seconds(num_tokens) if cost and num_tokens else 0.0

    def around_s(self, schedule: Schedule, num_requests: int, num_offered: float = 0.0) -> float:
        """Return the seconds of a round beyond its passes, in which so many requests verify what writers offer."""
        ratio = self._around.get(self.drafts(schedule))
        return self._first_around_s(schedule, num_requests, num_offered) * (ratio.value if ratio else 1.0)

    def observe_prompts(self, schedule: Schedule, outcome: Outcome) -> None:
        """Learn from a round that only read prompts."""
        further_s = outcome.result.busy_s - self.at_start[schedule].target.seconds(1)
        self._prompts.observe(outcome.view.num_prompt_tokens, outcome.view.num_prompt_pairs, further_s)

    def observe(self, schedule: Schedule, width: int, outcome: Outcome, *, is_reading: bool = False) -> None:
        """Learn from a round that decoded something, with beams of this width.

        Args:
            is_reading: the drafter read a text in its turn, which gives no time of a layer.
        """
        view, result = outcome.view, outcome.result
        num_requests = len(view.requests)
        self.rows = view.num_context_rows / num_requests
        if not view.num_prompt_tokens:
            num_experts = self._observed_experts(result)
            predicted_s = self._predicted_s(schedule, result.num_tokens, num_requests, num_experts)
            place = schedule == "beside", bucket(result.num_tokens)
            self._target.setdefault(place, Ratio(most_at_first=2.0)).observe(result.busy_s, predicted_s)
            around_s = outcome.seconds - result.busy_s - view.waited_s
            num_offered = sum(bool(one.offer.writers) for one in result.verified)
            self._around.setdefault(self.drafts(schedule), Ratio()).observe(
                around_s, self._first_around_s(schedule, num_requests, num_offered)
            )
        if view.passes and not is_reading:
            layers = [(seconds, self._layer_s(schedule, num_drafted, 1)) for num_drafted, seconds in view.passes]
            self._first_layer.observe(*layers[0])
            if len(layers) > 1:
                ratio = self._layers.setdefault(schedule, Ratio())
                ratio.observe(sum(taken for taken, _ in layers[1:]), sum(expected for _, expected in layers[1:]))
        elif outcome.drafter_passes and not view.takes_turns:
            busy_s = outcome.drafter_busy_s * num_requests / outcome.drafter_passes
            self._layers.setdefault(schedule, Ratio(most_at_first=2.0)).observe(
                busy_s, self._layer_s(schedule, num_requests, width)
            )

    def _predicted_s(
        self, schedule: Schedule, num_tokens: float, num_requests: int, num_experts: float | None = None
    ) -> float:
        """Return the seconds of a pass as measured at start, for requests of the present length.

        Rows beyond the sizes that were measured cost what those of prompts do: a slow model has few sizes measured.
        """
        target, num_rows, prompts = self.at_start[schedule].target, num_requests * self.rows, self._prompts
        if num_experts is None:
            num_experts = self._num_experts(num_tokens)
        measured = num_tokens if self.has_experts or not prompts.row_s else min(num_tokens, target.points[-1][0])
        more_s = (num_tokens - measured) * prompts.row_s
        more_s += max(0.0, num_tokens - num_requests) * self.rows * prompts.pair_s
        return target.seconds(measured, num_requests, num_rows, num_experts) + more_s

    def _num_experts(self, num_tokens: float) -> float | None:
        """Return how many distinct experts a pass is expected to read by the passes so far; None without experts."""
        return None if self._use is None else self._use.expected(num_tokens)

    def _observed_experts(self, result: StepResult) -> float | None:
        """Learn from the distinct experts of a pass, and return them: seconds are then a matter of the machine."""
        if self._use is None or not result.num_experts:
            return self._num_experts(result.num_tokens)
        self._use.observe(result.num_tokens, result.num_experts)
        return result.num_experts

    def _ratio_of(self, schedule: Schedule, num_tokens: float) -> float:
        """Return measured over predicted seconds of such passes, else of the most similar ones."""
        is_beside, size = schedule == "beside", bucket(int(num_tokens))
        ratio = self._target.get((is_beside, size))
        if ratio is None:
            seen = [(abs(rows - size), rows) for other, rows in self._target if other == is_beside]
            ratio = self._target[is_beside, min(seen)[1]] if seen else None
        return ratio.value if ratio else 1.0

    def _layer_s(self, schedule: Schedule, num_requests: int, width: int) -> float:
        cost = self.at_start[schedule].drafter
        if cost is None:
            return 0.0
        python_s = ROUND_S if schedule == "turns" else 0.0
        return cost.seconds(num_requests * width, num_requests, num_requests * self.rows) + python_s

    def _first_around_s(self, schedule: Schedule, num_requests: int, num_offered: float) -> float:
        return ROUND_S * (1 + num_requests / 5) * (2 if self.drafts(schedule) else 1) + num_offered * REQUEST_S
