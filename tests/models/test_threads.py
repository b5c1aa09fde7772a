"""Integer passes have threads of their own, and torch has one beside them."""

from __future__ import annotations

import threading

import torch

from card.engine.cores import Home, pinned
from card.models.threads import integer_pass_threads


def test_integer_passes_have_the_threads_and_torch_has_one() -> None:
    before = torch.get_num_threads(), integer_pass_threads()
    with pinned(Home((), 3, in_integers=True)):
        assert (torch.get_num_threads(), integer_pass_threads()) == (1, 3)
        with pinned(Home((), 2)):
            assert (torch.get_num_threads(), integer_pass_threads()) == (2, 1)
        assert (torch.get_num_threads(), integer_pass_threads()) == (1, 3)
        with pinned(Home(in_integers=True)):  # as many as there were
            assert (torch.get_num_threads(), integer_pass_threads()) == (1, 3)
        with pinned(Home()):
            assert (torch.get_num_threads(), integer_pass_threads()) == (3, 1)
    assert (torch.get_num_threads(), integer_pass_threads()) == before


def test_another_thread_has_its_own_number() -> None:
    seen = []
    with pinned(Home((), 5, in_integers=True)):
        asking = threading.Thread(target=lambda: seen.append(integer_pass_threads()))
        asking.start()
        asking.join()
    assert seen != [5]
