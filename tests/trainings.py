"""Trainings that are cut off, and what must come of them when they go on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from card.family.learning import target_texts
from card.family.learning.head_training import TrainedHead
from tests.commands import Ran


def stopping(after: int | None) -> Callable[[int, int], None]:
    """Return what is called after each step of a training and ends it after that one; None: it ends by itself."""

    def show(step: int, _: int) -> None:
        if step == after:
            raise InterruptedError

    return show


@contextlib.contextmanager
def cut_off_at_the_end(module: ModuleType, name: str) -> Iterator[None]:
    """Inside the block a user interrupts the function of a module that trains, at its last step."""
    whole = getattr(module, name)

    def cut_off(*args: Any, on_step: Callable[[int, int], None], **options: Any) -> Any:
        def show(step: int, num_steps: int) -> None:
            if step == num_steps:
                raise KeyboardInterrupt
            on_step(step, num_steps)

        return whole(*args, on_step=show, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, cut_off)
        yield


def require_kept(*_: Any, is_left_out: Sequence[bool], **options: Any) -> Iterator[Any]:
    """Stand for `written_texts` where all answers were kept."""
    assert all(is_left_out)
    return iter(())


def check_a_command_goes_on(run: Callable[..., Ran], args: Iterable[str], whole: Path, cut: tuple[ModuleType, str]):
    """Check that a command which is cut off and run again writes the head of the file or folder ``whole``.

    Args:
        args: of the command, but for the name of its output.
        cut: module and name of the function that trains.
    """
    again = whole.with_name("again.safetensors" if whole.is_file() else "again")
    with cut_off_at_the_end(*cut):
        assert run(*args, str(again)).status == 130
    assert not again.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_texts, "written_texts", require_kept)
        assert run(*args, str(again)).status == 0
    files = (one if one.is_file() else one / "model.safetensors" for one in (whole, again))
    with safe_open(next(files), "pt") as one, safe_open(next(files), "pt") as other:
        assert one.metadata() == other.metadata()
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in one.keys())  # noqa: SIM118


def check_a_head_goes_on(train: Callable[..., TrainedHead[Any]], folder: Path) -> None:
    """Check that a training in ``folder/cut``, cut off after 16 steps, ends with the weights of one in one go."""
    (folder / "cut").mkdir()
    (folder / "whole").mkdir()
    with pytest.raises(InterruptedError):
        train(folder / "cut", stop_after=16)
    gone_on, whole = train(folder / "cut"), train(folder / "whole")
    assert len(gone_on.losses) < len(whole.losses), "it did not begin anew"
    weights = whole.head.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in gone_on.head.state_dict().items())


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write a file of JSON lines and return its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
