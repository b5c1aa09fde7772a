"""Integer passes have threads of their own, and torch has one beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from card.machine import loaded
from card.machine.threads import CoreSet, ThreadsKept, default_threads, integer_pass_threads, pinned, use_threads


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


@pytest.mark.parametrize("variables", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "9", "MKL_NUM_THREADS": "1"}])
def test_a_pass_has_as_many_threads_before_torch_is_loaded_as_after(variables: dict[str, str]) -> None:
    program = """
        import sys
        from card.machine.threads import integer_pass_threads
        before = integer_pass_threads()
        assert "torch" not in sys.modules
        import torch
        assert before == torch.get_num_threads() == integer_pass_threads(), (before, torch.get_num_threads())
    """
    others = {name: text for name, text in os.environ.items() if not name.endswith("_NUM_THREADS")}
    program = "\n".join(line.strip() for line in program.splitlines())
    ran = subprocess.run([sys.executable, "-c", program], env=others | variables, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


def test_without_torch_the_threads_are_counted_and_put_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert loaded.loaded_torch() is None
    before = integer_pass_threads()
    with pinned(CoreSet((), 3, in_integers=True)):
        assert integer_pass_threads() == ThreadsKept().num_threads == 3
        with pinned(CoreSet((), 2)):
            assert (ThreadsKept().num_threads, integer_pass_threads()) == (2, 1)
            use_threads(4, in_integers=False)
        assert integer_pass_threads() == 3
    assert integer_pass_threads() == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not tell which cores there are")
def test_two_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    assert default_threads(tmp_path) == 4
    for core, siblings in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}.items():
        place = tmp_path / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{siblings}\n", "ascii")
    assert default_threads(tmp_path) == 2
