"""Settings for all tests: no network, one thread per process, interrupts heard, property tests without a deadline."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# Set before any test imports torch or transformers, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # where a test asks for two threads, one that waits leaves its core to others

# Rewriting the assertions of all tests takes seconds in each process: keep what came of it, whatever a container says.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# What starts keep for later ones stays with this run.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="card-tests-cache-")

# A shell that starts the suite in the background has it ignore interrupts, and so would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.examples import EXAMPLES
from tests.without_torch import is_run_by_core, needs_torch

if TYPE_CHECKING:  # importing torch takes seconds, also in the process that only shares out the tests
    from card.machine.threads import CoreSet
    from tests.pair import Pair


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no line tell that a command takes long: a busy machine takes long, and tests compare what was written."""
    monkeypatch.setattr("card.machine.heartbeat.FIRST_S", 3600.0)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Drop the log of a server that a test has started in this process: it writes to that test's standard error."""
    yield
    root = logging.getLogger()
    root.handlers[:] = [one for one in root.handlers if type(one.formatter).__name__ != "JsonFormatter"]


atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# The same examples wherever the tests run, so that everybody finds the same things; `make test-slow` draws new ones. No
# deadline, nor a bound of time for making examples: a loaded machine is slow, not wrong.
_UNHURRIED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("same", derandomize=True, max_examples=16, **_UNHURRIED)
hypothesis.settings.register_profile("new", **_UNHURRIED)
hypothesis.settings.load_profile(EXAMPLES)


def pytest_report_header() -> str:
    """Tell which examples property tests draw, and how to draw others."""
    if EXAMPLES == "same":
        return "property tests draw the same examples each time; CARD_TEST_EXAMPLES=new draws others"
    return "property tests draw new examples; a failure says how to repeat it, and --hypothesis-seed=N repeats a run"


def pytest_configure(config: pytest.Config) -> None:
    """Keep machine code between runs, if there is a place for it: what it was compiled from is part of its name."""
    kept = config.rootpath / ".pytest_cache" / "machine-code"
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
        folder = Path(os.environ["XDG_CACHE_HOME"], "card")
        folder.mkdir()
        (folder / "code").symlink_to(kept)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give no test less time than a hung machine takes, whatever its module says: a busy machine is slow, not wrong."""
    hung_s = float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark is not None and mark.args and mark.args[0] < hung_s:
            item.add_marker(pytest.mark.timeout(hung_s), append=False)


_LEFT_OUT = list[str]()  # names of modules


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `make test` gives, which runs the core's tests in their own environment, so once."""
    parser.addoption("--beside-core", action="store_true", help="leave out what make test-core runs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that import torch where it is not installed; what of the package imports it still fails."""
    if collection_path.suffix != ".py":
        return None
    if config.option.beside_core:
        is_left_out = is_run_by_core(collection_path)
    else:
        is_left_out = find_spec("torch") is None and needs_torch(collection_path)
    if not is_left_out:
        return None
    _LEFT_OUT.append(collection_path.name)
    return True


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """Tell how many were left out."""
    why = "make test-core runs them" if config.option.beside_core else "torch is not installed"
    return f"left out, as {why}: {len(_LEFT_OUT)} modules" if _LEFT_OUT else ""


def pytest_sessionstart() -> None:
    """Look for no garbage while modules and tests are collected, which stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Never look for garbage among modules and tests again: through all of them a look takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def models_freed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what functions of a module have cached when its tests are done: models, of 1.5 GB in one of the modules."""
    yield
    for one in vars(request.module).values():
        if isinstance(one, functools._lru_cache_wrapper) and one.__module__ == request.module.__name__:
            one.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def measures_in_haste() -> Iterator[None]:
    """Let engines in this process start on one thread and measure in milliseconds, and take each moment for quiet.

    They give no memory back to the system: to find it takes longer than the rest of many a start, among many libraries.
    """
    try:
        from card.api import start
        from card.assembly import drafters
        from card.assembly.latency import measuring, threads
        from card.assembly.latency.threads import FoundThreads
        from tests.moments import QuietMoment
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "transformers"):
            raise
        yield  # make test-core: no engine starts in this process
        return

    def one_thread(_: object, core_set: CoreSet, **__: object) -> FoundThreads:
        return FoundThreads(replace(core_set, threads=1), was_quiet=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "useful_threads", one_thread)
        for module in (measuring, threads):
            patch.setattr(module, "CoreWatch", QuietMoment)
        for module in (start, drafters):
            patch.setattr(module, "give_back_memory", lambda: None)
        patch.setattr(measuring, "MEASURING_S", 0.05)
        patch.setattr(drafters, "IN_TURNS_S", 0.05)
        patch.setattr(drafters, "MEASURING_S", 0.05)
        yield


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    """Commands that run inside the test process set the number of threads; the next test starts with the old one."""
    from card.machine.threads import ThreadsKept

    before = ThreadsKept()
    yield
    before.restore()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny pair on disk, made once; not to be changed."""
    from tests.pair import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))
