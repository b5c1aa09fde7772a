"""Number of threads for a model's passes: all that it may have, unless pairs of passes say that fewer are faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from card.assembly.latency.timing import PassBench, TimedPass
from card.machine.core_groups import NO_GROUPS, CoreGroups
from card.machine.quiet import CoreWatch
from card.machine.threads import CoreSet, ThreadsKept, pinned
from card.models.protocol import LanguageModel

# Passes with all threads and with fewer are timed in pairs, one after the other.
_SIZES = (4, 16, 1)  # tokens of the compared passes, as verifications have; the first alone if passes are long
_TURN_S = 0.02  # seconds for the passes of one side of a pair
_MOST_PAIRS, _LEAST_PAIRS = 6, 4  # pairs in a comparison
_LIMIT_S = 0.3  # seconds after which no further pair begins, unless fewer threads were faster in each so far
AS_FAST = 1.03  # times as long, up to which fewer threads count as no slower
_NUM_LOST = 2  # pairs in which fewer threads were slower, after which the comparison ends
_WON_BY = 0.95  # of the time with all threads, in the median pair, which fewer threads must beat
_FEW_PAIRS = 2  # pairs that check a kept result


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs of passes on two sets of cores, one right after the other."""

    ratios: tuple[float, ...]  # of each pair: seconds with fewer threads over seconds with more
    was_quiet: bool | None  # no other process used the cores meanwhile; None where the system does not tell

    @property
    def is_slower(self) -> bool:
        """True if passes with fewer threads are slower."""
        return sum(ratio > AS_FAST for ratio in self.ratios) >= _NUM_LOST

    @property
    def is_as_fast(self) -> bool:
        """True if passes with fewer threads are no slower: never by what was measured beside other work."""
        has_pairs = self.was_quiet is not False and len(self.ratios) >= _LEAST_PAIRS
        return has_pairs and not self.is_slower and median(self.ratios) <= AS_FAST

    @property
    def is_faster(self) -> bool:
        """True if passes with fewer threads are faster, in all pairs but one at most."""
        num_won = sum(ratio < 1.0 for ratio in self.ratios)
        return self.is_as_fast and num_won >= len(self.ratios) - 1 and median(self.ratios) < _WON_BY


@dataclass(frozen=True, slots=True)
class FoundThreads:
    """Cores with a useful number of threads."""

    core_set: CoreSet
    was_quiet: bool | None  # as of `Comparison`, of all comparisons


def useful_threads(
    model: LanguageModel, core_set: CoreSet, *, clock: Callable[[], float], groups: CoreGroups = NO_GROUPS
) -> FoundThreads:
    """Return the cores with all their threads, or with half, a quarter, ... of them if that is faster.

    Then the fast cores alone are tried, and whole groups of cores between what was found and what was tried beside it.

    Fewer threads are faster where passes are so small that threads wait for each other longer than they compute. All
    threads win ties, and every comparison made beside other work: that work ends, and then each round would lack the
    threads.

    Raises: CapacityError if the model has no room for a single sequence.
    """
    best, num_threads = core_set, core_set.threads
    if num_threads is None:  # where the system does not say which cores there are
        with pinned(core_set):
            num_threads = ThreadsKept().num_threads
    was_quiet: bool | None = True
    tried = [num_threads]
    while num_threads > 1:
        num_threads = (num_threads + 1) // 2
        tried.append(num_threads)
        fewer = replace(core_set, threads=num_threads)
        compared = compare(model, best, fewer, clock=clock)
        was_quiet = was_quiet and compared.was_quiet
        if compared.is_faster:
            best = fewer
        elif not compared.is_as_fast:
            break
    return _with_groups(model, FoundThreads(best, was_quiet), tried, groups, clock)


def _with_groups(
    model: LanguageModel, measured: FoundThreads, tried: list[int], groups: CoreGroups, clock: Callable[[], float]
) -> FoundThreads:
    """Return what was found among numbers that were tried, or a number of whole groups of cores that is faster."""
    num_threads = tried[0] if measured.core_set.threads is None else measured.core_set.threads
    above = min((count for count in tried if count > num_threads), default=num_threads)
    below = max((count for count in tried if count < num_threads), default=0)
    candidates = (groups.fast, groups.between(num_threads, above), groups.between(below, num_threads))
    was_quiet = measured.was_quiet
    for count in dict.fromkeys(one for one in candidates if one and one not in tried and one < tried[0]):
        if was_quiet is False:
            break
        other = replace(measured.core_set, threads=count)
        more, fewer = (other, measured.core_set) if count > num_threads else (measured.core_set, other)
        compared = compare(model, more, fewer, clock=clock)
        was_quiet = was_quiet and compared.was_quiet
        if compared.is_slower if count > num_threads else compared.is_faster:
            return FoundThreads(other, was_quiet)
    return FoundThreads(measured.core_set, was_quiet)


def compare(
    model: LanguageModel,
    more: CoreSet,
    fewer: CoreSet,
    *,
    clock: Callable[[], float],
    most_pairs: int = _MOST_PAIRS,
) -> Comparison:
    """Return what pairs of passes take on two sets of cores.

    The two of a pair follow each other, so that a slow moment of the machine affects both. It ends as soon as fewer
    threads are clearly slower, which is the usual case, or another process uses the cores.

    Args:
        more: the cores with more threads.
        most_pairs: that are timed.
    Raises: CapacityError if the model has no room for a single sequence.
    """
    watch, started = CoreWatch(), clock()
    compared = Comparison((), None)
    while len(compared.ratios) < most_pairs and not compared.is_slower and compared.was_quiet is not False:
        is_leading = all(ratio < 1.0 for ratio in compared.ratios) and len(compared.ratios) < _LEAST_PAIRS
        if clock() - started > _LIMIT_S and not is_leading:
            break
        with_more, with_fewer = (_passes_s(model, core_set, clock) for core_set in (more, fewer))
        both = with_more.keys() & with_fewer.keys()
        ratio = sum(with_fewer[size] for size in both) / sum(with_more[size] for size in both)
        compared = Comparison((*compared.ratios, ratio), watch.was_quiet())
    return compared


def is_contradicted(model: LanguageModel, more: CoreSet, fewer: CoreSet, *, clock: Callable[[], float]) -> bool:
    """Return whether a few pairs all say, in a quiet moment, that fewer threads are slower."""
    compared = compare(model, more, fewer, clock=clock, most_pairs=_FEW_PAIRS)
    return compared.is_slower and compared.was_quiet is not False


def _passes_s(model: LanguageModel, core_set: CoreSet, clock: Callable[[], float]) -> dict[int, float]:
    """Return the shortest seconds of a pass of each number of tokens that a turn on these cores comes to."""
    sizes = dict.fromkeys(min(size, model.max_model_len) for size in _SIZES)
    with pinned(core_set):
        bench = PassBench(model, clock)
        try:
            slot = bench.open(max(sizes))
            fastest_s = bench.fastest([TimedPass((slot,), size) for size in sizes], clock() + _TURN_S, num_needed=1)
            return {timed.num_tokens: seconds for timed, seconds in fastest_s.items()}
        finally:
            bench.close()
