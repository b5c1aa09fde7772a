"""What Ctrl-C must not cut in two comes to its end, and the interrupt is heard behind it."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from card.machine.uninterrupted import uninterrupted
from tests.waiting import PATIENCE_S


def test_work_that_is_interrupted_comes_to_its_end() -> None:
    done, ended = list[str](), threading.Event()

    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.extend(str(number) for number in range(100_000))  # long enough for an interrupt to fall into it
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)
    assert ended.wait(PATIENCE_S)
    assert len(done) == 100_000


def test_what_work_returns_or_raises_reaches_the_caller() -> None:
    assert uninterrupted(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 // 0)


def test_a_thread_that_no_interrupt_reaches_does_it_itself() -> None:
    with ThreadPoolExecutor(1) as thread:
        ident = thread.submit(threading.get_ident).result()
        assert thread.submit(uninterrupted, threading.get_ident).result() == ident
    assert uninterrupted(threading.get_ident) != threading.get_ident()
