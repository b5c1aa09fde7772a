"""What a forward pass costs: a model of seconds by tokens, sequences and context, measured at start and kept true."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from card.engine.cores import CorePlan, Home, pinned
from card.errors import CapacityError, SettingsError
from card.models.protocol import Extension, LanguageModel

_PREFIX_ROWS = 8  # context under which the points are measured; counted as none
_LONG_CONTEXT_ROWS = 512
_FAR_TOKENS = 1 << 24  # more than any pass has
_WARMED_TOKENS = 17  # passes of up to so many tokens run once before any is timed: rounds have those of every size
_MOST_RUNS = 15  # of each timed pass; a large model gets fewer within its time
_POINTS_SHARE, _SEQUENCES_SHARE, _PREFILL_SHARE = 0.6, 0.75, 0.9  # of the time limit, after which each part stops

_TRIED_TOKENS = (4, 16)  # of the passes that the number of threads is chosen for: more tokens gain more by them
_TRYING_S, _TRYING_TURNS = 0.04, 10  # for each number of threads, and how often
_TRYING_LIMIT_S = 3.0  # after which no further turn begins: passes of large models are long, and scatter less
_QUICK_TURNS, _QUICK_LIMIT_S = 2, 0.2  # the same while somebody waits
_AS_FAST = 1.03  # times the seconds of the fastest number of threads: more of them may take so long

_NEWEST_WEIGHT = 0.05  # of an observation in the means, once there are more than 1 / 0.05 of them
_RESUMED = 5  # observations that all count for which were made before a pause
_SLOPE_PRIOR = 0.02  # weight of slope 1, as a variance relative to the mean's square
_LEAST_SLOPE, _MOST_SLOPE = 0.3, 3.0
_NEWEST_TOKENS_WEIGHT = 0.02  # of an observation in what is learnt of the price of tokens
_TOKEN_PRIOR = 5.0  # tokens squared: weight of a price of 0, as a variance of the tokens of a pass


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one forward pass of one model on a given number of threads.

    Linear between the measured points and, beyond the last, along the line through the last two; never falling with
    more tokens: a point below an earlier one is noise and is raised to it.

    Raises: SettingsError unless there are two points or more with rising token counts, and all seconds are 0 or more.
    """

    points: tuple[tuple[int, float], ...]  # (new tokens, seconds) of one sequence with a short context
    per_sequence_s: float = 0.0  # for each sequence after the first, at the same number of tokens
    per_context_row_s: float = 0.0  # for each row held before the pass, summed over the sequences
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lines: tuple[tuple[int, float, float], ...] = field(init=False, repr=False, compare=False)
    _corners: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = tuple(num_tokens for num_tokens, _ in self.points)
        if len(starts) < 2 or starts[0] < 1 or any(b <= a for a, b in pairwise(starts)):
            raise SettingsError(
                f"points must be two or more with rising numbers of tokens from 1 on, got {self.points}; measure passes"
                " of at least two sizes"
            )
        times = (*(seconds for _, seconds in self.points), self.per_sequence_s, self.per_context_row_s)
        if not all(0.0 <= seconds < math.inf for seconds in times):
            raise SettingsError(f"seconds of a pass must be finite and 0 or more, got {times}")
        points = tuple(zip(starts, accumulate((seconds for _, seconds in self.points), max), strict=True))
        lines = [(x, y, (next_y - y) / (next_x - x)) for (x, y), (next_x, next_y) in pairwise(points)]
        below, last_slope = (starts[0], points[0][1], 0.0), lines[-1][2]
        far = (_FAR_TOKENS, points[-1][1] + last_slope * (_FAR_TOKENS - starts[-1]))
        object.__setattr__(self, "_corners", tuple(np.array([*points, far], dtype=np.float64).T))
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_lines", (below, *lines, (*points[-1], last_slope)))

    def seconds(self, num_tokens: int, num_sequences: int = 1, num_context_rows: int = 0) -> float:
        """Return the seconds of one pass; 0 if it has no tokens, for then none is made.

        Args:
            num_tokens: new tokens of all sequences together.
            num_sequences: sequences that share them.
            num_context_rows: rows that these sequences hold already, all together.
        """
        if num_tokens < 1:
            return 0.0
        x, y, slope = self._lines[bisect_right(self._starts, num_tokens)]
        shared_s = (num_sequences - 1) * self.per_sequence_s + num_context_rows * self.per_context_row_s
        return y + slope * (num_tokens - x) + shared_s

    def each(
        self, num_tokens: npt.NDArray[np.int64], num_sequences: int = 1, num_context_rows: int = 0
    ) -> npt.NDArray[np.float64]:
        """Return `seconds` of passes of these numbers of tokens, 1 or more each."""
        shared_s = (num_sequences - 1) * self.per_sequence_s + num_context_rows * self.per_context_row_s
        return np.interp(num_tokens, *self._corners) + shared_s

    def marginal_s(self, num_tokens: int) -> float:
        """Return the seconds that one more token adds to a pass of ``num_tokens``; context changes nothing."""
        return self.seconds(num_tokens + 1) - self.seconds(num_tokens)

    def scaled(self, factor: float) -> PassCost:
        """Return a copy in which everything takes ``factor`` times as long."""
        points = tuple((num_tokens, factor * seconds) for num_tokens, seconds in self.points)
        return PassCost(points, factor * self.per_sequence_s, factor * self.per_context_row_s)


def measure_pass_cost(
    model: LanguageModel,
    *,
    clock: Callable[[], float],
    max_tokens: int = 64,
    max_sequences: int = 8,
    time_limit_s: float = 1.5,
) -> PassCost:
    """Time passes of 1, 2, 4, ... tokens, of several sequences and on a long context; leave the model as it was.

    Of each pass the shortest of up to 15 runs counts, after one untimed run: whatever else the machine does only
    adds time, so the shortest is nearest to what the pass itself takes. The runs of the different passes alternate, so
    that a slow moment hits them alike. Before, passes of all sizes that rounds often have run once: on a CPU the first
    one of its size, on so many threads, was measured to take up to twice as long.

    Args:
        model: no sequence needs to be open; those that the model has no room for are left out.
        clock: seconds; rises steadily.
        max_tokens: most new tokens of a timed pass, 2 or more.
        max_sequences: most sequences in a timed pass.
        time_limit_s: no untimed pass of any size begins after half of it, and from then on no new pass after so long,
            once those of 1 and of 8 tokens have been timed. Sequences and context cost nothing in the result if time
            was up before their turn.
    Raises: CapacityError if the model has no room for a single sequence; SettingsError if it allows one token only.
    """
    bench = _Bench(model, clock)
    try:
        num_prefix_rows = max(1, min(_PREFIX_ROWS, model.max_model_len // 2))
        most = min(max_tokens, model.max_model_len - num_prefix_rows)
        slot = bench.open(num_prefix_rows + most)
        bench.prefill([slot], num_prefix_rows)
        bench.warm(
            [_Pass((slot,), size) for size in range(1, min(most, _WARMED_TOKENS) + 1)], clock() + time_limit_s / 2
        )
        started = clock()
        until_points, until_sequences, until_prefill, until = (
            started + share * time_limit_s for share in (_POINTS_SHARE, _SEQUENCES_SHARE, _PREFILL_SHARE, 1.0)
        )
        found = bench.fastest([_Pass((slot,), size) for size in _sizes(most)], until_points, num_needed=2)
        cost = PassCost(_hull(sorted((timed.num_tokens, seconds) for timed, seconds in found.items())))
        per_sequence_s = _per_sequence_s(bench, cost, slot, max_sequences, until_sequences)
        per_row_s = _per_context_row_s(bench, cost, most, until_prefill, until)
        return PassCost(cost.points, per_sequence_s, per_row_s)
    finally:
        bench.close()


def single_pass_s(model: LanguageModel, *, clock: Callable[[], float], num_runs: int) -> float:
    """Return the shortest seconds of so many passes of one token, after one that is not timed.

    Raises: CapacityError if the model has no room for a single sequence.
    """
    bench = _Bench(model, clock)
    try:
        timed = _Pass((bench.open(_PREFIX_ROWS + 1),), 1)
        return min([bench._run_s(timed) for _ in range(1 + num_runs)][1:])
    finally:
        bench.close()


def with_useful_threads(
    plan: CorePlan,
    model: LanguageModel,
    *,
    clock: Callable[[], float] = time.perf_counter,
    is_quick: bool = False,
    limit_s: float | None = None,
) -> CorePlan:
    """Return the plan with as many threads for the target as do not slow its passes down: small models want few.

    Args:
        is_quick: take a third of the usual time or less, as somebody waits for the first text.
        limit_s: seconds after which no further turn begins; None: some seconds, or fewer if it is to be quick.
    """
    turns, usual_s = (_QUICK_TURNS, _QUICK_LIMIT_S) if is_quick else (_TRYING_TURNS, _TRYING_LIMIT_S)
    longest_s = usual_s if limit_s is None else limit_s
    alone = _useful(plan.alone, model, clock, turns, longest_s)
    beside = alone if plan.beside == plan.alone else _useful(plan.beside, model, clock, turns, longest_s)
    return replace(plan, beside=beside, alone=alone)


def _useful(home: Home, model: LanguageModel, clock: Callable[[], float], num_turns: int, limit_s: float) -> Home:
    """Return the home with the fastest number of threads, or more that take as long.

    Each count has several turns, of which each pass's shortest time counts: whatever else the machine does must last
    through all of them to decide. Something may: two virtual cores can be one real core for seconds, and where further
    threads then cost nothing they gain later. So they win ties: threads that are missing are missed in every round.
    """
    counts, started = _thread_counts(home.threads or 1), clock()
    fastest = {threads: dict.fromkeys(_TRIED_TOKENS, math.inf) for threads in counts}
    for turn in range(num_turns if len(counts) > 1 else 0):
        if turn and clock() - started > limit_s:
            break
        for threads, best in fastest.items():
            for num_tokens, seconds in _tried_s(replace(home, threads=threads), model, clock).items():
                best[num_tokens] = min(best[num_tokens], seconds)
    sums_s = {threads: sum(best.values()) for threads, best in fastest.items()}
    longest_s = _AS_FAST * min(sums_s.values())
    return replace(home, threads=max(threads for threads in counts if sums_s[threads] <= longest_s))


def _thread_counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most``."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _tried_s(home: Home, model: LanguageModel, clock: Callable[[], float]) -> dict[int, float]:
    """Return the shortest seconds of a pass of each of the tried numbers of tokens, or of as many as fit."""
    with pinned(home):
        bench = _Bench(model, clock)
        try:
            slot = bench.open(min(max(_TRIED_TOKENS), model.max_model_len))
            passes = [_Pass((slot,), min(num_tokens, model.max_model_len)) for num_tokens in _TRIED_TOKENS]
            found = bench.fastest(passes, clock() + _TRYING_S, num_needed=len(passes))
            return {num_tokens: found[timed] for num_tokens, timed in zip(_TRIED_TOKENS, passes, strict=True)}
        finally:
            bench.close()


class LatencyFit:
    """What passes take, as a line over what was predicted, learnt while the machine runs.

    The line goes through the fading means of both. Its slope is learnt from how they vary together, and begins at 1: a
    constant delay of each pass is not taken for a higher price of its tokens. One pass counts as at most twice, at
    least half of what was expected, so that a hiccup is not taken for a slow machine.

    Where further tokens were nearly free at start, predictions vary too little to learn a slope from. So what passes
    with more tokens take beyond the line is learnt besides, as seconds per token: a core that others load makes
    tokens dear long before it makes a pass of one of them slow.
    """

    def __init__(self) -> None:
        self._num_observed = 0
        self._predicted_s = self._measured_s = 0.0  # means
        self._variance = self._covariance = 0.0  # of predicted; of predicted and measured
        self._num_counted = 0  # passes whose tokens were told
        self._num_tokens = 0.0  # mean
        self._token_variance = self._token_covariance = 0.0  # of tokens; of tokens and seconds beyond the line

    @property
    def ratio(self) -> float | None:
        """Measured seconds for each predicted one over all; None until a pass was taken."""
        return self._measured_s / self._predicted_s if self._num_observed else None

    @property
    def is_settled(self) -> bool:
        """Whether enough passes were taken for changes of `ratio` to be the machine's."""
        return self._num_observed * _NEWEST_WEIGHT > 1

    @property
    def slope(self) -> float:
        """Measured seconds for each predicted second that a pass is longer."""
        prior = _SLOPE_PRIOR * self._predicted_s**2
        if prior <= 0.0:
            return 1.0
        return max(_LEAST_SLOPE, min(_MOST_SLOPE, (self._covariance + prior) / (self._variance + prior)))

    @property
    def token_s(self) -> float:
        """Seconds that each token takes beyond what the line says; 0 or more."""
        return max(0.0, self._token_covariance / (self._token_variance + _TOKEN_PRIOR))

    def seconds(self, predicted_s: float, num_tokens: float | None = None) -> float:
        """Return what a pass will take that was predicted to take so long; not negative.

        Args:
            num_tokens: of the pass, where those of observed passes were told.
        """
        dearer_s = 0.0 if num_tokens is None else self.token_s * (num_tokens - self._num_tokens)
        return max(0.0, self._line(predicted_s) + dearer_s)

    def plane(self) -> tuple[float, float, float]:
        """Return `seconds` as it is now, without its lower bound of 0.

        Returns: seconds in any case, seconds for each predicted second, and seconds for each token.
        """
        slope, token_s = self.slope, self.token_s
        return self._measured_s - slope * self._predicted_s - token_s * self._num_tokens, slope, token_s

    def observe(self, predicted_s: float, measured_s: float, num_tokens: float | None = None) -> None:
        """Take one pass; ignored if one of the two is not above 0, as with a clock too coarse for the pass."""
        if predicted_s <= 0.0 or measured_s <= 0.0:
            return
        expected_s = max(self.seconds(predicted_s, num_tokens), 0.1 * predicted_s)
        measured_s = max(0.5 * expected_s, min(2.0 * expected_s, measured_s))
        self._num_observed += 1
        weight = max(_NEWEST_WEIGHT, 1.0 / self._num_observed)
        from_mean_s = predicted_s - self._predicted_s
        self._predicted_s += weight * from_mean_s
        self._measured_s += weight * (measured_s - self._measured_s)
        self._variance = (1 - weight) * self._variance + weight * from_mean_s * (predicted_s - self._predicted_s)
        self._covariance = (1 - weight) * self._covariance + weight * from_mean_s * (measured_s - self._measured_s)
        if num_tokens is not None:
            self._observe_tokens(num_tokens, measured_s - self._line(predicted_s))

    def resume(self) -> None:
        """Let the next passes count for more: none was taken for a while, and others told of the machine meanwhile."""
        self._num_observed = min(self._num_observed, _RESUMED)

    def scale(self, factor: float) -> None:
        """Expect all passes to take so many times as long: the whole machine's speed has changed meanwhile."""
        self._measured_s *= factor

    def _line(self, predicted_s: float) -> float:
        return self._measured_s + self.slope * (predicted_s - self._predicted_s)

    def _observe_tokens(self, num_tokens: float, beyond_s: float) -> None:
        self._num_counted += 1
        weight = max(_NEWEST_TOKENS_WEIGHT, 1.0 / self._num_counted)
        from_mean = num_tokens - self._num_tokens
        self._num_tokens += weight * from_mean
        rest = from_mean * (1 - weight)
        self._token_variance = (1 - weight) * self._token_variance + weight * from_mean * rest
        self._token_covariance = (1 - weight) * self._token_covariance + weight * rest * beyond_s


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass to be timed: so many new tokens in each of these sequences."""

    slots: tuple[int, ...]
    num_tokens: int


class _Bench:
    """Sequences of token 0 in a model; each timed pass is undone before the next."""

    def __init__(self, model: LanguageModel, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.model = model
        self._slots: list[int] = []

    def open(self, num_rows: int) -> int:
        self._slots.append(self.model.open(num_rows))
        return self._slots[-1]

    def close(self) -> None:
        for slot in self._slots:
            self.model.close(slot)

    def prefill(self, slots: Iterable[int], num_tokens: int) -> None:
        self.model.forward([self._chain(slot, num_tokens, first_logits_idx=num_tokens - 1) for slot in slots])

    def warm(self, passes: Sequence[_Pass], until: float) -> None:
        """Run passes once, the longest first, as far as time allows."""
        for untimed in reversed(passes):
            if self.clock() >= until:
                return
            self._run_s(untimed)

    def fastest(self, passes: Sequence[_Pass], until: float, num_needed: int = 0) -> dict[_Pass, float]:
        """Return the shortest seconds of each pass reached before ``until``; the first ones are timed in any case."""
        best: dict[_Pass, float] = {}
        for _ in range(_MOST_RUNS):
            for idx, timed in enumerate(passes):
                is_new = timed not in best
                if self.clock() >= until and not (is_new and idx < num_needed):
                    return best
                if is_new:
                    self._run_s(timed)  # the first of its shape may compile, allocate or fill caches
                best[timed] = min(best.get(timed, math.inf), self._run_s(timed))
        return best

    def _run_s(self, timed: _Pass) -> float:
        extensions = [self._chain(slot, timed.num_tokens) for slot in timed.slots]
        started = self.clock()
        logits = self.model.forward(extensions)
        logits[-1][-1, 0].item()  # a GPU works on after forward returns: reading a number waits for it
        seconds = self.clock() - started
        for extension in extensions:
            self.model.keep(extension.slot, extension.parents[0] + 1)
        return seconds

    def _chain(self, slot: int, num_tokens: int, first_logits_idx: int = 0) -> Extension:
        last_row = self.model.num_rows(slot) - 1  # NO_PARENT in an empty sequence
        return Extension(slot, [0] * num_tokens, range(last_row, last_row + num_tokens), first_logits_idx)


def _hull(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the points on the lower convex hull, with rising numbers of tokens as given.

    Passes are bound by reading weights at first and by arithmetic later, so their seconds bend upwards; a point above
    the line between its neighbours was disturbed, and the flat line behind it would make tokens seem free.
    """
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        if len(hull) == 1 and hull[0][1] > y:
            hull = [(hull[0][0], y)]  # a first pass slower than a later one was disturbed as well
        hull.append((x, y))
    return tuple(hull)


def _sizes(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``most`` (itself included), those first that say most if time runs out."""
    sizes = [1 << power for power in range(most.bit_length())]
    if sizes and sizes[-1] != most:
        sizes.append(most)
    return sorted(sizes, key=lambda size: (size != 1, size < 8, size if size >= 8 else -size))


def _per_sequence_s(bench: _Bench, cost: PassCost, first_slot: int, max_sequences: int, until: float) -> float:
    """Return what each further sequence adds to a pass of as many tokens; least squares through (1 sequence, 0)."""
    slots = [first_slot]
    num_prefix_rows = bench.model.num_rows(first_slot)
    if max_sequences < 2 or bench.clock() >= until:
        return 0.0
    try:
        while len(slots) < max_sequences:
            slots.append(bench.open(num_prefix_rows + 1))
    except CapacityError:
        if len(slots) == 1:
            return 0.0
    bench.prefill(slots[1:], num_prefix_rows)
    counts = sorted({len(slots), *(size for size in _sizes(len(slots)) if size > 1)}, reverse=True)
    found = bench.fastest([_Pass(tuple(slots[:count]), 1) for count in counts], until)
    weighted_s = squares = 0.0
    for timed, seconds in found.items():
        num_further = len(timed.slots) - 1
        weighted_s += num_further * (seconds - cost.seconds(len(timed.slots)))
        squares += num_further**2
    return max(0.0, weighted_s / squares) if squares else 0.0


def _per_context_row_s(bench: _Bench, cost: PassCost, chunk_tokens: int, until_prefill: float, until: float) -> float:
    """Return what each row of context adds to a pass of one token, from as long a context as time and model allow."""
    most_rows = min(_LONG_CONTEXT_ROWS, bench.model.max_model_len - 1)
    if bench.clock() >= until_prefill:
        return 0.0
    try:
        slot = bench.open(most_rows + 1)
    except CapacityError:
        return 0.0
    num_rows = 0
    while num_rows < most_rows and bench.clock() < until_prefill:
        bench.prefill([slot], min(chunk_tokens, most_rows - num_rows))
        num_rows = bench.model.num_rows(slot)
    num_further = num_rows - _PREFIX_ROWS
    if num_further < _PREFIX_ROWS:
        return 0.0
    (seconds,) = bench.fastest([_Pass((slot,), 1)], until, num_needed=1).values()
    return max(0.0, (seconds - cost.seconds(1)) / num_further)
