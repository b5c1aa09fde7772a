"""Threads of a model: all, unless pairs of passes of a quiet moment say that fewer are faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from card.assembly.latency import threads
from card.assembly.latency.threads import Comparison, compare, is_contradicted, useful_threads
from card.machine.core_groups import NO_GROUPS, CoreGroups
from card.machine.threads import CoreSet, pinned
from tests.assembly.latency.timed_model import TimedModel
from tests.moments import DisturbedMoment, QuietMoment, UntoldMoment

Seconds = Callable[[int, int, float], float]  # of a pass, by (threads, tokens, time so far)


def timed(seconds: Seconds, **options: int) -> TimedModel:
    model = TimedModel(lambda num_tokens, *_: seconds(torch.get_num_threads(), num_tokens, model.now_s), **options)
    return model


def found(seconds: Seconds, most: int = 2, groups: CoreGroups = NO_GROUPS, **options: int) -> int | None:
    model = timed(seconds, **options)
    return useful_threads(model, CoreSet((), most), clock=model.clock, groups=groups).core_set.threads


def pairs(seconds: Seconds, **options: int) -> Comparison:
    model = timed(seconds, **options)
    return compare(model, CoreSet((), 2), CoreSet((), 1), clock=model.clock)


def waiting_for_each_other(threads: int, num_tokens: int, now_s: float) -> float:
    """Passes so small that each further thread makes them slower."""
    return 0.002 + 0.001 * threads


def test_fewer_threads_are_taken_where_the_pairs_of_a_quiet_moment_say_that_they_are_faster() -> None:
    assert found(waiting_for_each_other) == 1
    assert found(lambda threads, *_: 0.004 / min(threads, 4) * (1.2 if threads > 4 else 1.0), most=16) == 4
    assert found(lambda threads, *_: 0.004 if threads == 2 else 0.005, most=3) == 2


def test_fewer_threads_win_all_pairs_but_one_in_a_quiet_moment_or_are_not_taken() -> None:
    won = (0.8, 0.8, 0.8, 0.8)
    assert Comparison((*won, 1.01), was_quiet=True).is_faster
    assert not Comparison((*won, 1.01, 1.01), was_quiet=True).is_faster
    assert not Comparison(won, was_quiet=False).is_as_fast


def best_at(count: int) -> Seconds:
    return lambda threads, *_: 0.002 * max(threads / count, count / threads)


@pytest.mark.parametrize(
    ("most", "best", "groups", "expected"),
    [
        (64, 48, CoreGroups(0, (8, 16, 24, 32, 40, 48, 56)), 48),  # between all and half of them
        (64, 24, CoreGroups(0, (8, 16, 24, 32, 40, 48, 56)), 24),  # between what won and what did not
        (64, 20, CoreGroups(), 16),  # nothing is told
        (14, 6, CoreGroups(6), 6),  # fast cores, though half of all are slower than all
        (2, 1, CoreGroups(), 1),
    ],
)
def test_whole_groups_of_cores_are_tried_between_halves(
    most: int, best: int, groups: CoreGroups, expected: int
) -> None:
    slow_cores = best == groups.fast

    def seconds(threads: int, *_: object) -> float:
        return 0.002 * (1.0 if threads == best else 1.2 if threads == most else 1.9)

    assert found(seconds if slow_cores else best_at(best), most=most, groups=groups) == expected


def test_where_all_threads_are_best_groups_cost_one_more_comparison_at_most() -> None:
    counts = list[int]()

    def seconds(threads: int, *_: object) -> float:
        counts.append(threads)
        return 0.1 / threads

    assert found(seconds, most=64, groups=CoreGroups(0, (16, 32, 48))) == 64
    assert set(counts) == {64, 32, 48}
    counts.clear()
    assert found(seconds, most=2) == 2
    assert set(counts) == {2, 1}, "as before where there are no groups"


def test_without_a_number_the_threads_that_passes_have_are_where_it_begins() -> None:
    model = timed(waiting_for_each_other)
    with pinned(CoreSet((), 4)):
        assert useful_threads(model, CoreSet(), clock=model.clock).core_set.threads == 1


def test_fewer_threads_are_never_chosen_from_disturbed_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CoreWatch", DisturbedMoment)
    assert found(waiting_for_each_other, most=16) == 16
    assert not pairs(waiting_for_each_other).is_as_fast
    assert len(pairs(waiting_for_each_other).ratios) == 1, "it is of no use to go on"


def test_where_the_system_does_not_tell_fewer_threads_serve_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CoreWatch", UntoldMoment)
    assert found(waiting_for_each_other) == 1


@pytest.mark.parametrize("moment", [QuietMoment, DisturbedMoment, UntoldMoment])
def test_who_looks_for_threads_is_told_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, moment: type[QuietMoment]
) -> None:
    monkeypatch.setattr(threads, "CoreWatch", moment)
    model = timed(waiting_for_each_other)
    assert useful_threads(model, CoreSet((), 4), clock=model.clock).was_quiet is moment.said


def test_all_threads_are_taken_where_they_change_nothing_as_they_may_help_later() -> None:
    assert found(lambda threads, *_: 0.004) == 2
    assert found(lambda threads, *_: 0.004 * (1.04 if threads > 1 else 1.0)) == 2


def test_all_threads_are_taken_where_they_help_passes_of_many_tokens_alone() -> None:
    def seconds(threads: int, num_tokens: int, now_s: float) -> float:
        return 0.003 + 0.0001 * threads + 0.0003 * max(num_tokens - 8, 0) / threads

    assert found(seconds) == 2


def test_a_slow_moment_hits_both_of_a_pair_and_decides_nothing() -> None:
    def seconds(threads: int, num_tokens: int, now_s: float) -> float:
        return (3.0 if now_s % 0.1 > 0.05 else 1.0) * 0.004 / threads**0.5

    assert found(seconds) == 2


def test_one_pair_that_is_disturbed_does_not_keep_fewer_threads_from_winning() -> None:
    def seconds(threads: int, num_tokens: int, now_s: float) -> float:
        return 0.02 if 0.1 < now_s < 0.13 and threads == 1 else waiting_for_each_other(threads, num_tokens, now_s)

    assert found(seconds) == 1


def test_it_ends_once_fewer_threads_are_slower() -> None:
    faster = pairs(lambda threads, *_: 0.004 / threads)
    assert faster.is_slower and not faster.is_as_fast
    assert len(faster.ratios) == 2
    equal = pairs(lambda threads, *_: 0.001)
    assert equal.is_as_fast and not equal.is_faster and not equal.is_slower
    assert len(equal.ratios) == 6


def test_threads_of_a_slow_model_are_tried_in_one_pair_of_one_size() -> None:
    sizes: list[int] = []

    def seconds(threads: int, num_tokens: int, now_s: float) -> float:
        sizes.append(num_tokens)
        return 2.0 / threads

    assert found(seconds) == 2
    assert sizes == [4] * 4, "each once untimed and once timed, on 2 and on 1 threads"


def test_a_slow_model_has_as_many_pairs_as_it_takes_to_choose_fewer_threads() -> None:
    assert found(lambda threads, *_: 2.0 * threads) == 1


def test_threads_are_compared_by_the_sizes_that_both_came_to() -> None:
    """One thread comes to 4 tokens alone, two come to 16 as well."""
    assert found(lambda threads, num_tokens, _: (0.03 if num_tokens == 4 else 0.01) / threads) == 2


def test_threads_can_be_chosen_for_a_model_of_very_short_context() -> None:
    assert found(lambda threads, *_: 0.004 / threads, max_model_len=3, num_tree_rows=0) == 2


@pytest.mark.parametrize(("moment", "is_gone"), [(QuietMoment, True), (UntoldMoment, True), (DisturbedMoment, False)])
def test_what_is_kept_is_not_contradicted_beside_other_work(
    monkeypatch: pytest.MonkeyPatch, moment: type[QuietMoment], is_gone: bool
) -> None:
    monkeypatch.setattr(threads, "CoreWatch", moment)
    model = timed(lambda threads, *_: 0.004 / threads)
    assert is_contradicted(model, CoreSet((), 2), CoreSet((), 1), clock=model.clock) is is_gone


def test_what_is_kept_stays_where_a_few_pairs_agree() -> None:
    model = timed(waiting_for_each_other)
    assert not is_contradicted(model, CoreSet((), 2), CoreSet((), 1), clock=model.clock)
    assert model.num_open == 0
