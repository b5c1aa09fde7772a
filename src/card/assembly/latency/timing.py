"""Cost of a forward pass: a model of seconds by tokens, sequences and context, measured at start and kept true."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from card.errors import CapacityError
from card.machine.expert_cost import ExpertCounts
from card.machine.pass_cost import PassCost
from card.models.protocol import Extension, LanguageModel, Routed
from card.models.runner import RowRunner

_PREFIX_ROWS = 8  # context under which the points are measured; counted as none
_LONG_CONTEXT_ROWS = 512
_WARMED_TOKENS = 17  # passes of up to so many tokens run once before any is timed: rounds have those of every size
# Tokens of the passes that say most, if time runs out. The first four are timed in any case: without 16 and 17 a batch
# of 16 takes a 17th row for one of the same tile. Evidence: 4 rows of a model of 0.5 B take 30 ms with AVX2, where a
# line from 1 to 8 says 37; 64 take half a second.
_FIRST_SIZES, _NUM_NEEDED = (1, 8, 16, 17, 4), 4
# Rows are multiplied in tiles of 16, so the first row of another tile costs much and the next ones little. Evidence:
# 85 ms for 16 rows, 107 for 17, 110 for 18, 143 for 32, 163 for 33 (Qwen2.5-Coder 1.5 B, Q4_K_M, Xeon with AMX).
_BEHIND_TILES = (17, 33)
_SEED = 0  # of the tokens
_MOST_RUNS = 15  # of each timed pass; a large model gets fewer within its time
_POINTS_SHARE, _SEQUENCES_SHARE, _PREFILL_SHARE = 0.6, 0.75, 0.9  # of the time limit, after which each part stops


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
    that a slow moment affects them all. Before, passes of all sizes that rounds often have run once: on a CPU the first
    one of its size, on so many threads, was measured to take up to twice as long.

    Tokens are drawn with a fixed seed, so that rows meet different experts where a model has any.

    Args:
        model: no sequence needs to be open; those that the model has no room for are left out.
        clock: seconds; rises steadily.
        max_tokens: most new tokens of a timed pass, 2 or more.
        max_sequences: most sequences in a timed pass.
        time_limit_s: no untimed pass of any size begins after half of it, and from then on no new pass after so long,
            once those of 1, 8, 16 and 17 tokens have been timed. Sequences and context cost nothing in the result if
            time was up before their turn.
    Raises: CapacityError if the model has no room for a single sequence; SettingsError if it allows one token only.
    """
    bench = PassBench(model, clock)
    try:
        until_warm = clock() + time_limit_s / 2
        num_prefix_rows = max(0, min(_PREFIX_ROWS, model.max_model_len // 2, model.max_model_len - 2))
        most = min(max_tokens, model.max_model_len - num_prefix_rows)
        slot = bench.open(num_prefix_rows + most)
        bench.prefill([slot], num_prefix_rows)
        bench.warm_up([TimedPass((slot,), size) for size in range(1, min(most, _WARMED_TOKENS) + 1)], until_warm)
        started = clock()
        until_points, until_sequences, until_prefill, until = (
            started + share * time_limit_s for share in (_POINTS_SHARE, _SEQUENCES_SHARE, _PREFILL_SHARE, 1.0)
        )
        sizes = _sizes(most, () if bench.is_routed else _BEHIND_TILES)
        fastest_s = bench.fastest([TimedPass((slot,), size) for size in sizes], until_points, _NUM_NEEDED)
        points = sorted((timed.num_tokens, seconds) for timed, seconds in fastest_s.items())
        experts = bench.experts_of(fastest_s)
        cost = PassCost(_with_steps(points)) if experts is None else PassCost(tuple(points), experts=experts)
        per_sequence_s = _per_sequence_s(bench, cost, slot, max_sequences, until_sequences)
        per_row_s = _per_context_row_s(bench, cost, most, until_prefill, until)
        return PassCost(cost.points, per_sequence_s, per_row_s, experts)
    finally:
        bench.close()


def single_pass_takes(
    model: LanguageModel, low_s: float, high_s: float, *, clock: Callable[[], float], num_runs: int
) -> bool:
    """Return whether a pass of one token takes between these seconds, after one that is not timed.

    The first run that does ends it; a slow one is repeated, as whatever else the machine does only adds time.

    Raises: CapacityError if the model has no room for a single sequence.
    """
    bench = PassBench(model, clock)
    try:
        timed = TimedPass((bench.open(_PREFIX_ROWS + 1),), 1)
        bench.run_s(timed)
        return any(low_s <= bench.run_s(timed) <= high_s for _ in range(num_runs))
    finally:
        bench.close()


@dataclass(frozen=True, slots=True)
class TimedPass:
    """A pass to be timed: so many new tokens in each of these sequences."""

    slots: tuple[int, ...]
    num_tokens: int


class PassBench:
    """Sequences of different tokens in a model; each timed pass is undone before the next."""

    def __init__(self, model: LanguageModel, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.model = model
        self._routed = model if isinstance(model, Routed) and model.experts is not None else None
        self._inputs = model.block_inputs if isinstance(model, RowRunner) else None
        self._texts: dict[int, list[int]] = {}  # of each sequence, as long as it has room for
        self._draw = random.Random(_SEED)
        self._num_read: dict[TimedPass, int] = {}  # distinct experts
        self._ran: set[TimedPass] = set()

    def open(self, num_rows: int) -> int:
        """Open a sequence of so many rows at most. Raises: CapacityError if there is no room for it."""
        slot = self.model.open(num_rows)
        self._texts[slot] = self._draw.choices(range(self.model.vocab_size), k=num_rows)
        return slot

    def close(self) -> None:
        """Close all sequences."""
        for slot in self._texts:
            self.model.close(slot)

    def num_read(self, timed: TimedPass) -> int | None:
        """Return the distinct experts that this pass read, summed over the layers; None if it counts none."""
        return self._num_read.get(timed)

    def experts_of(self, passes: Iterable[TimedPass]) -> ExpertCounts | None:
        """Return the distinct experts that these passes read; None for a model without any."""
        if self._routed is None or (facts := self._routed.experts) is None:
            return None
        return ExpertCounts(
            num_experts=facts.num_expert_layers * facts.num_experts,
            per_row=facts.num_expert_layers * facts.experts_per_token,
            counted=tuple(sorted((one.num_tokens, self._num_read[one]) for one in passes if one in self._num_read)),
        )

    def prefill(self, slots: Iterable[int], num_tokens: int) -> None:
        """Add so many tokens, which may be none, to each of these sequences."""
        if num_tokens:
            chains = [self._chain(slot, num_tokens, first_logits_idx=num_tokens - 1) for slot in slots]
            self.model.forward([self._with_inputs(chain) for chain in chains])

    def warm_up(self, passes: Sequence[TimedPass], until: float) -> None:
        """Run passes once, the longest first, as far as time allows."""
        for untimed in reversed(passes):
            if self.clock() >= until:
                return
            self.run_s(untimed)

    @property
    def is_routed(self) -> bool:
        """True if rows of a pass choose experts."""
        return self._routed is not None

    def fastest(self, passes: Sequence[TimedPass], until: float, num_needed: int = 0) -> dict[TimedPass, float]:
        """Return the shortest seconds of each pass reached before ``until``; the first ones are timed in any case."""
        best: dict[TimedPass, float] = {}
        for _ in range(_MOST_RUNS):
            for idx, timed in enumerate(passes):
                is_new = timed not in best
                if self.clock() >= until and not (is_new and idx < num_needed):
                    return best
                if timed not in self._ran:
                    self.run_s(timed)  # the first of its shape may compile, allocate or fill caches
                best[timed] = min(best.get(timed, math.inf), self.run_s(timed))
        return best

    def run_s(self, timed: TimedPass) -> float:
        """Return the seconds of one pass, which is undone."""
        self._ran.add(timed)
        extensions = [self._chain(slot, timed.num_tokens) for slot in timed.slots]
        started = self.clock()
        logits = self.model.forward([self._with_inputs(one) for one in extensions])
        np.asarray(logits[-1])  # a GPU works on after forward returns: reading waits for it
        seconds = self.clock() - started
        if self._routed is not None and self._routed.experts_read:
            self._num_read[timed] = self._routed.experts_read
        for extension in extensions:
            self.model.keep(extension.slot, extension.parents[0] + 1)
        return seconds

    def _with_inputs(self, chain: Extension) -> Extension:
        """Return the chain as a drafter that reads states runs it: making its inputs is a part of the pass."""
        if self._inputs is None:
            return chain
        states = np.zeros((len(chain.token_ids), self._inputs.width), np.float32)
        return replace(chain, inputs=self._inputs.rows(chain.token_ids, states))

    def _chain(self, slot: int, num_tokens: int, first_logits_idx: int = 0) -> Extension:
        num_rows = self.model.num_rows(slot)
        token_ids = self._texts[slot][num_rows : num_rows + num_tokens]
        last_row = num_rows - 1  # NO_PARENT in an empty sequence
        return Extension(slot, token_ids, range(last_row, last_row + num_tokens), first_logits_idx)


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


def _with_steps(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the lower convex hull of all points but those behind a tile, and these as far as they stand above it.

    No step is higher than what the whole next tile takes. Behind the last one rows cost what they did before it.
    """
    hull = _hull([(size, seconds) for size, seconds in points if size not in _BEHIND_TILES])
    if len(hull) < 2:
        return _hull(points)
    smooth = PassCost(hull)
    stepped = dict(hull)
    for size, seconds in points:
        if size in _BEHIND_TILES and seconds > smooth.seconds(size):
            stepped[size - 1] = smooth.seconds(size - 1)
            stepped[size] = min(seconds, smooth.seconds(2 * size - 2))
            stepped.setdefault(size + 1, stepped[size] + smooth.seconds(size + 1) - smooth.seconds(size))
    return tuple(sorted(stepped.items()))


def _sizes(most: int, steps: Sequence[int] = ()) -> list[int]:
    """Return 1, 2, 4, ... up to ``most`` (itself included) and ``steps``, those first that say most."""
    sizes = {1 << power for power in range(most.bit_length())}
    sizes |= {size for size in (*steps, most) if 0 < size <= most}
    return sorted(sizes, key=lambda size: (_FIRST_SIZES.index(size) if size in _FIRST_SIZES else math.inf, size))


def _per_sequence_s(bench: PassBench, cost: PassCost, first_slot: int, max_sequences: int, until: float) -> float:
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
    fastest_s = bench.fastest([TimedPass(tuple(slots[:count]), 1) for count in counts], until)
    weighted_s = squares = 0.0
    for timed, seconds in fastest_s.items():
        num_further = len(timed.slots) - 1
        weighted_s += num_further * (seconds - cost.seconds(len(timed.slots), num_experts=bench.num_read(timed)))
        squares += num_further**2
    return max(0.0, weighted_s / squares) if squares else 0.0


def _per_context_row_s(
    bench: PassBench, cost: PassCost, chunk_tokens: int, until_prefill: float, until: float
) -> float:
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
    (seconds,) = bench.fastest([TimedPass((slot,), 1)], until, num_needed=1).values()
    return max(0.0, (seconds - cost.seconds(1)) / num_further)
