"""The end of an engine: what is closed, or left behind by a fork, answers in one line and never hangs."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

from card import LLM, AsyncLLM, SamplingParams
from card.errors import ClosedError, SettingsError, WorkerError
from card.machine.home import AT_HOME

QUICK: dict[str, Any] = {"cache": False, "check": False, "policy": "fixed"}
PAIR = ("demo-target", "demo-draft")
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
FEW = SamplingParams(max_tokens=3)

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("method", "placement"), [("vanilla", None), ("sps", "inline"), ("sps", "thread"), ("pearl", "process")]
)
def test_whoever_is_answered_while_another_thread_closes_hears_that_it_is_closed(method: str, placement: Any) -> None:
    llm = LLM(*PAIR[: 1 if method == "vanilla" else 2], method=method, placement=placement, **QUICK)
    heard: SimpleQueue[object] = SimpleQueue()

    def listen() -> None:
        try:
            for chunk in llm.stream("hello", LONG):
                heard.put(chunk)
        except Exception as error:
            heard.put(error)

    threads = [Thread(target=listen) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert not isinstance(heard.get(), Exception)
    llm.close()
    for thread in threads:
        thread.join()
    errors = []
    while not heard.empty():
        if isinstance(one := heard.get(), Exception):
            errors.append(one)
    assert [(type(one), str(one)) for one in errors] == [(ClosedError, "the engine was shut down; make a new LLM")] * 3


def test_a_closed_llm_refuses_what_a_closed_async_llm_refuses() -> None:
    llm = LLM(**QUICK)
    begun = llm.stream("hello", LONG)
    next(begun)
    for _ in range(2):
        llm.close()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("hello", FEW),
        lambda: llm.chat([{"role": "user", "content": "hello"}], FEW),
        lambda: llm.stream("hello", FEW),
        lambda: next(begun),
        llm.stats,
        llm.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(WorkerError, match=r"^the engine was shut down; make a new LLM$"):
            call()

    async def ask() -> None:
        other = AsyncLLM(**QUICK)
        await other.shutdown()
        for one in (lambda: other.generate("hello", FEW), other.stats):
            with pytest.raises(WorkerError, match=r"^the engine was shut down; make a new AsyncLLM$"):
                one()
        for waited in (other.score("hello"), other.abort("x")):
            with pytest.raises(WorkerError, match=r"^the engine was shut down; make a new AsyncLLM$"):
                await waited

    asyncio.run(ask())


FORKED = """
import asyncio, multiprocessing, sys
from card import LLM, AsyncLLM, SamplingParams, CardError

FEW = SamplingParams(max_tokens=3)
SETTINGS = {"cache": False, "check": False}

def check_refused(*calls):
    for call in calls:
        try:
            call()
        except CardError as error:
            assert str(error).startswith("an LLM belongs to the process that made it"), error
        else:
            raise AssertionError("it answered")

def ask(_):
    check_refused(lambda: llm.generate("hello", FEW), llm.stats, llm.reset_prefix_cache, lambda: next(begun))
    begun.close()
    llm.close()  # ends nothing of the parent's
    with LLM(**SETTINGS) as own:
        return own.generate("hello", FEW)[0].outputs[0].token_ids

async def ask_there():
    check_refused(lambda: there.generate("hello", FEW), there.stats)
    try:
        await there.score("hello")
    except CardError as error:
        await there.shutdown()
        return str(error)

def ask_async(_):
    return asyncio.run(ask_there())

if __name__ == "__main__":
    llm = LLM("demo-target", "demo-draft", method=sys.argv[1], placement=sys.argv[2], wait_for_drafter=True, **SETTINGS)
    there = AsyncLLM(**SETTINGS)
    wanted = llm.generate("hello", FEW)[0].outputs[0].token_ids
    begun = llm.stream("hello", SamplingParams(max_tokens=900, ignore_eos=True))
    next(begun)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(ask, [1]) == [wanted]
        assert pool.map(ask_async, [1])[0].startswith("an LLM belongs to")
        pool.close()
        pool.join()
    again = llm.generate("hello", FEW)[0]
    assert again.outputs[0].token_ids == wanted
    print(again.stats.drafter_state)
    llm.close()
    asyncio.run(there.shutdown())
"""


@pytest.mark.parametrize(("method", "placement"), [("sps", "inline"), ("pearl", "process"), ("pearl", "thread")])
def test_a_forked_child_is_told_to_make_its_own_and_the_parent_keeps_its_drafter(method: str, placement: str) -> None:
    ran = [sys.executable, "-W", "ignore", "-c", FORKED, method, placement]
    done = subprocess.run(ran, capture_output=True, text=True, check=False, timeout=170)
    assert (done.returncode, done.stdout.strip()) == (0, "up"), done.stderr


def test_an_engine_cannot_be_pickled_and_says_what_to_do_instead() -> None:
    with LLM(**QUICK) as llm, pytest.raises(SettingsError, match=AT_HOME):
        pickle.dumps(llm)
