"""What a start keeps for the next one: what quiet moments have shown, checked by a few passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from card.assembly.latency import measuring, threads
from card.assembly.latency.measuring import Measuring
from card.assembly.latency.store import LatencyStore
from card.assembly.latency.threads import useful_threads
from card.machine.threads import CorePlan, CoreSet
from tests.assembly.latency.kept import kept_names
from tests.assembly.latency.timed_model import TimedModel
from tests.moments import DisturbedMoment, QuietMoment, UntoldMoment

ALL = CoreSet((), 2)
ALONE = CorePlan(ALL, ALL, ())
Seconds = Callable[[int], float]  # of a pass, by threads


def waiting_for_each_other(threads: int) -> float:
    return 0.002 + 0.001 * threads


def shared(threads: int) -> float:
    return 0.004 / threads


class Machine:
    """A machine on which a pass takes what it is told, and starts on it that share a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch
        patch.setattr(measuring, "useful_threads", useful_threads)  # other tests take one thread unseen

    def start(self, seconds: Seconds, moment: type[QuietMoment] = QuietMoment, plan: CorePlan = ALONE) -> Measuring:
        """Return what an engine that starts in such a moment measures with."""
        model: Any = TimedModel(lambda *_: seconds(torch.get_num_threads()))
        model.precision, model.device, self.model = "float32", torch.device("cpu"), model
        for module in (measuring, threads):
            self._patch.setattr(module, "CoreWatch", moment)
        started = Measuring(model, LatencyStore(self.folder), "a target", max_sequences=2, clock=model.clock)
        started.forget_if_wrong(plan)
        return started

    @property
    def num_kept(self) -> int:
        return len(kept_names(self.folder))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_is_measured_beside_other_work_serves_this_start_and_is_not_on_disk(machine: Machine) -> None:
    hurried = machine.start(waiting_for_each_other, DisturbedMoment)
    assert hurried.with_useful_threads(ALL) == ALL
    cost = hurried.cost(ALL)
    assert cost.seconds(1) == pytest.approx(0.004)
    passes_s = machine.model.now_s
    assert hurried.cost(ALL) == cost
    assert machine.model.now_s == passes_s, "once in a start"
    assert machine.num_kept == 0


def test_a_quiet_start_finds_what_a_disturbed_one_could_not(machine: Machine) -> None:
    assert machine.start(waiting_for_each_other, DisturbedMoment).with_useful_threads(ALL).threads == 2
    assert machine.start(waiting_for_each_other).with_useful_threads(ALL).threads == 1
    assert machine.start(waiting_for_each_other, DisturbedMoment).with_useful_threads(ALL).threads == 1, "it is kept"


def test_what_is_kept_is_not_measured_again(machine: Machine) -> None:
    for num_started in range(2):
        started = machine.start(shared)
        passes_s = machine.model.now_s
        started.cost(started.with_useful_threads(ALL))
        assert (machine.model.now_s > passes_s) is (num_started == 0)


def test_where_the_system_does_not_tell_costs_are_kept_and_threads_are_looked_for_again(machine: Machine) -> None:
    for _ in range(2):
        started = machine.start(waiting_for_each_other, UntoldMoment)
        passes_s = machine.model.now_s
        useful = started.with_useful_threads(ALL)
        assert machine.model.now_s > passes_s
        started.cost(useful)
        assert machine.num_kept == 1


@pytest.mark.parametrize(("moment", "is_forgotten"), [(QuietMoment, True), (DisturbedMoment, False)])
def test_a_pass_that_takes_another_time_tells_of_another_machine_unless_others_have_the_cores(
    machine: Machine, moment: type[QuietMoment], is_forgotten: bool
) -> None:
    machine.start(shared).cost(ALL)
    later = machine.start(lambda threads: 9 * shared(threads), moment)
    assert (machine.num_kept == 0) is is_forgotten
    assert later.cost(ALL).seconds(1) == pytest.approx(0.018 if is_forgotten else 0.002)


def test_fewer_threads_that_are_slower_by_now_are_forgotten(machine: Machine) -> None:
    assert machine.start(waiting_for_each_other).with_useful_threads(ALL).threads == 1
    assert machine.start(shared, DisturbedMoment).with_useful_threads(ALL).threads == 1
    assert machine.start(shared).with_useful_threads(ALL).threads == 2


# ---- cores that the target does not miss ----------------------------------------------------------------------------

FOUR = CorePlan(CoreSet((), 3), CoreSet((), 4), (3,))


def bound_by_memory(threads: int) -> float:
    return 0.004 / min(threads, 3)


@pytest.mark.parametrize(("seconds", "misses"), [(bound_by_memory, False), (shared, True)])
def test_whether_the_target_misses_a_core_is_found_by_pairs_and_kept(
    machine: Machine, seconds: Seconds, misses: bool
) -> None:
    for num_started in range(2):
        started = machine.start(seconds, plan=FOUR)
        passes_s = machine.model.now_s
        assert started.misses_cores(FOUR) is misses
        assert (machine.model.now_s > passes_s) is (num_started == 0)


def test_beside_other_work_a_target_is_taken_to_miss_all_its_cores(machine: Machine) -> None:
    assert machine.start(bound_by_memory, DisturbedMoment, FOUR).misses_cores(FOUR)
    assert machine.num_kept == 0
    assert not machine.start(bound_by_memory, plan=FOUR).misses_cores(FOUR)


def test_a_core_that_the_target_misses_by_now_is_no_longer_spare(machine: Machine) -> None:
    assert not machine.start(bound_by_memory, plan=FOUR).misses_cores(FOUR)
    assert machine.start(shared, plan=FOUR).misses_cores(FOUR)


def test_cores_that_the_target_does_not_use_are_not_missed(machine: Machine) -> None:
    started = machine.start(shared)
    assert not started.misses_cores(replace(FOUR, alone=CoreSet((), 2)))
    assert not started.misses_cores(CorePlan(CoreSet((0,), 1), CoreSet((0,), 1), (1,)))
    assert started.misses_cores(CorePlan(CoreSet((), 2), CoreSet((), 2), ())), (
        "with a quota nobody knows which they are"
    )
    assert machine.model.now_s == 0.0, "no pass says more"


def test_more_threads_than_cores_do_not_make_up_for_a_core_that_a_drafter_takes(machine: Machine) -> None:
    assert machine.start(shared).misses_cores(CorePlan(CoreSet((0,), 2), CoreSet((), 2), (1,)))


def test_two_cores_are_never_shared_with_a_drafter_by_what_passes_say(machine: Machine) -> None:
    assert machine.start(lambda _: 0.004).misses_cores(CorePlan(CoreSet((0,), 1), CoreSet((), 2), (1,)))
    assert machine.model.now_s == 0.0
