"""Integer passes have threads of their own, and torch has one beside them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import pytest
import torch

from card.machine.threads import CoreSet, integer_pass_threads, pinned


def test_integer_passes_have_the_threads_and_torch_has_one() -> None:
    before = torch.get_num_threads(), integer_pass_threads()
    with pinned(CoreSet((), 3, in_integers=True)):
        assert (torch.get_num_threads(), integer_pass_threads()) == (1, 3)
        with pinned(CoreSet((), 2)):
            assert (torch.get_num_threads(), integer_pass_threads()) == (2, 1)
        assert (torch.get_num_threads(), integer_pass_threads()) == (1, 3)
        with pinned(CoreSet(in_integers=True)):  # as many as there were
            assert (torch.get_num_threads(), integer_pass_threads()) == (1, 3)
        with pinned(CoreSet()):
            assert (torch.get_num_threads(), integer_pass_threads()) == (3, 1)
    assert (torch.get_num_threads(), integer_pass_threads()) == before


def test_another_thread_has_its_own_number() -> None:
    seen = []
    with pinned(CoreSet((), 5, in_integers=True)):
        asking = threading.Thread(target=lambda: seen.append(integer_pass_threads()))
        asking.start()
        asking.join()
    assert seen != [5]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_a_thread_that_is_on_its_cores_is_not_pinned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own, pins = os.sched_getaffinity(0), list[set[int]]()
    real = os.sched_setaffinity

    def pin(pid: int, cores: Iterable[int]) -> None:
        pins.append(set(cores))
        real(pid, cores)

    monkeypatch.setattr(os, "sched_setaffinity", pin)
    with pinned(CoreSet(tuple(own))):
        assert os.sched_getaffinity(0) == own
    assert not pins
    with pinned(CoreSet((min(own),))):
        assert os.sched_getaffinity(0) == {min(own)}
    assert os.sched_getaffinity(0) == own
