"""The start of an engine: who gets a process, and when, and what its end leaves for the next start."""

from __future__ import annotations

import os

import psutil
import pytest

from card.api import host, start
from card.api.llm import LLM
from card.assembly.latency import measuring
from card.assembly.latency.threads import Comparison, FoundThreads
from card.config import SamplingParams
from card.drafting.local.lookup import LookupWriter
from card.drafting.local.suffix import SuffixWriter
from card.text.following import Threads
from card.text.grammar import GrammarCompiler
from tests.pair import Pair

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
_OTHERS: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def torch_module() -> None:
    """Leave out the drafters of servers that other modules' tests share."""
    _OTHERS.clear()
    _OTHERS.update(drafters())


def drafters() -> set[psutil.Process]:
    children = psutil.Process().children()
    return {child for child in children if "drafter_process" in "".join(child.cmdline())} - _OTHERS


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("num_cores", "ratio", "has_process"),
    [
        (2, 1.0, False),  # half of its cores are always missed, if half the threads are not faster
        (4, 1.3, False),
        (4, 1.0, True),
    ],
)
def test_a_drafter_gets_a_process_only_where_the_target_does_not_miss_its_core_and_not_before_all_is_measured(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, num_cores: int, ratio: float, has_process: bool
) -> None:
    measured: list[str] = []
    measure = measuring.measure_pass_cost

    def noted(*one: object, **more: object) -> object:
        measured.append("costs")
        assert not drafters()
        return measure(*one, **more)  # type: ignore[arg-type]

    def paired(*_: object, **__: object) -> Comparison:
        measured.append("pairs")
        assert not drafters()
        return Comparison((ratio,) * 6, was_quiet=True)

    first = min(os.sched_getaffinity(0))
    monkeypatch.setattr(start, "usable_cores", lambda: tuple(range(first, first + num_cores)))
    monkeypatch.setattr(start, "num_usable_cores", lambda: num_cores)
    monkeypatch.setattr(measuring, "useful_threads", lambda _, core_set, **__: FoundThreads(core_set, was_quiet=True))
    monkeypatch.setattr(measuring, "measure_pass_cost", noted)
    monkeypatch.setattr(measuring, "compare", paired)
    with LLM(pair.target, pair.draft, cache=False) as llm:
        assert bool(drafters()) is has_process
        assert measured.count("costs") == (2 if has_process else 1), "of each place of the target, once"
        assert measured.count("pairs") == (1 if num_cores == 4 else 0)
        assert llm.generate("the cat sat on the mat and", GREEDY)[0].outputs[0].token_ids
    assert not drafters()


def test_a_start_that_fails_leaves_no_drafter_behind(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        assert drafters()
        raise RuntimeError("no engine")

    monkeypatch.setattr(start, "build", failing)
    with pytest.raises(RuntimeError, match="no engine"):
        LLM(pair.target, pair.draft, method="pearl", cache=False)
    assert not drafters()


@pytest.mark.parametrize(
    ("step", "closed"), [("measure", {"grammars", "masks"}), ("build", {"grammars", "masks", "suffix", "lookup"})]
)
def test_a_start_that_fails_closes_what_it_has_opened(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: str, closed: set[str]
) -> None:
    told: list[str] = []

    def noted(kind: type, name: str) -> None:
        close = kind.close  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, "close", lambda self: (told.append(name), close(self)))

    def failing(*_: object) -> None:
        raise RuntimeError("no engine")

    kinds = {"grammars": GrammarCompiler, "masks": Threads, "suffix": SuffixWriter, "lookup": LookupWriter}
    for name, kind in kinds.items():
        noted(kind, name)
    monkeypatch.setattr(host if step == "measure" else start, step, failing)
    with pytest.raises(RuntimeError, match="no engine"):
        LLM(pair.target, writers=("suffix", "lookup"), cache=False)
    assert sorted(told) == sorted(closed)
