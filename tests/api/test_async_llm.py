"""The asyncio API: many requests at once, each with its own text, and nobody left behind or left waiting."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from card import AsyncLLM as PUBLIC_ASYNC_LLM
from card.api.async_llm import AsyncLLM, RequestStream
from card.api.llm import LLM
from card.api.outputs import StreamChunk
from card.api.text_stream import TextStream
from card.config import SamplingParams
from card.engine.metrics import EngineStats
from card.errors import PromptError, SettingsError, TargetError, WorkerError
from card.models.loading import load_tokenizer
from card.text.chat_template import render_chat
from tests.pair import Pair

TIMEOUT_S = 60.0
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "one", "two", "three", "four", "five", "six", "seven"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, seed=0)
LONG = SamplingParams(temperature=0.0, max_tokens=3000, seed=0, ignore_eos=True)

Make = Callable[..., AsyncLLM]

pytestmark = pytest.mark.timeout(180)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in an event loop of its own; nothing in here may hang."""
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


@pytest.fixture(scope="module")
def make(pair: Pair) -> Iterator[Make]:
    """Make AsyncLLMs, each kind of them once."""
    made: dict[tuple[object, ...], AsyncLLM] = {}

    def make_once(method: str = "card", **settings: Any) -> AsyncLLM:
        key = (method, *sorted(settings.items()))
        if key not in made:
            made[key] = make_llm(pair, method, **settings)
        return made[key]

    yield make_once
    for llm in made.values():
        run(llm.shutdown())


def make_llm(pair: Pair, method: str = "card", **settings: Any) -> AsyncLLM:
    draft = None if method == "vanilla" else pair.draft
    return AsyncLLM(pair.target, draft, method=method, dtype="float32", policy="fixed", **settings)


@pytest.fixture
def llm(make: Make) -> AsyncLLM:
    return make(placement="inline")


@pytest.fixture
def own_llm(pair: Pair) -> Iterator[AsyncLLM]:
    """One that the test may break."""
    llm = make_llm(pair, placement="inline")
    yield llm
    run(llm.shutdown())


async def read(stream: RequestStream) -> StreamChunk:
    """Return the whole answer as one chunk."""
    chunks = [chunk async for chunk in stream]
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    text = "".join(chunk.text for chunk in chunks)
    token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    return StreamChunk(text, token_ids, chunks[-1].finish_reason, chunks[-1].stats)


async def until(llm: AsyncLLM, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """Return the statistics once they are so."""
    while not holds(stats := llm.stats()):
        await asyncio.sleep(0.001)
    return stats


async def all_is_free(llm: AsyncLLM) -> None:
    """Wait until nothing runs, then look whether everything was given back."""
    stats = await until(llm, lambda stats: stats.num_running + stats.num_waiting == 0)
    assert stats.kv_open_sequences == 0
    assert stats.kv_used_bytes == stats.kv_retained_bytes
    assert not llm._driver._live
    assert not llm._driver._number_of
    worker = getattr(llm.host.link, "worker", None)
    while worker is not None and worker.drafting:  # one in a thread of its own may take a moment
        await asyncio.sleep(0.001)


def random_requests(count: int, seed: int = 0) -> list[tuple[str, SamplingParams]]:
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
        temperature = rng.choice([0.0, 1.0])
        stop = rng.choice([(), ("e",), ("at",)])
        params = SamplingParams(temperature=temperature, max_tokens=rng.randint(1, 40), seed=i, stop=stop)
        requests.append((prompt, params))
    return requests


# ---- the same text --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(pair: Pair) -> list[Any]:
    """What each request gives on its own, decoded plainly."""
    with LLM(pair.target, dtype="float32", method="vanilla") as llm:
        return [llm.generate(prompt, params)[0] for prompt, params in random_requests(16)]


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "vanilla"},
        {"placement": "inline"},
        {"placement": "inline", "max_num_seqs": 3, "prefill_chunk": 8},
        {"placement": "thread", "verify": "tree"},
        {"placement": "process"},
    ],
    ids=str,
)
def test_sixteen_requests_at_once_have_the_texts_that_each_has_alone(
    make: Make, alone: list[Any], settings: dict[str, Any]
) -> None:
    llm = make(**settings)

    async def main() -> list[StreamChunk]:
        streams = [llm.generate(prompt, params) for prompt, params in random_requests(16)]
        answers = await asyncio.gather(*(read(stream) for stream in streams))
        await all_is_free(llm)
        return answers

    for answer, wanted in zip(run(main()), alone, strict=True):
        output = wanted.outputs[0]
        assert (answer.text, answer.token_ids, answer.finish_reason) == (
            output.text,
            output.token_ids,
            output.finish_reason,
        )
        assert answer.stats.num_new_tokens == len(output.token_ids)


def test_requests_that_come_and_go_at_random_have_the_texts_that_each_has_alone(
    llm: AsyncLLM, alone: list[Any]
) -> None:
    rng = random.Random(4)

    async def ask(i: int, prompt: str, params: SamplingParams) -> StreamChunk:
        await asyncio.sleep(rng.random() * 0.1)
        if i % 3 == 0:
            async for _ in llm.generate(prompt, LONG):  # one that is left early
                break
        return await read(llm.generate(prompt, params))

    async def main() -> list[StreamChunk]:
        answers = await asyncio.gather(*(ask(i, *one) for i, one in enumerate(random_requests(16))))
        await all_is_free(llm)
        return answers

    assert [answer.token_ids for answer in run(main())] == [one.outputs[0].token_ids for one in alone]


def test_a_prompt_may_be_text_token_ids_or_a_conversation(llm: AsyncLLM, pair: Pair) -> None:
    tokenizer = load_tokenizer(pair.target)
    messages = [{"role": "user", "content": "the cat"}]
    chat = render_chat(tokenizer, messages, add_generation_prompt=True)

    async def main() -> list[StreamChunk]:
        prompts = [chat, messages, tokenizer.encode(chat)]
        return [await read(llm.generate(prompt, GREEDY)) for prompt in prompts]

    text, conversation, token_ids = run(main())
    assert text.token_ids == conversation.token_ids == token_ids.token_ids


def test_one_engine_serves_several_event_loops_at_once(llm: AsyncLLM, alone: list[Any]) -> None:
    requests, answers = random_requests(16), {}

    async def main(part: int) -> None:
        streams = [llm.generate(*requests[i]) for i in range(part, 16, 2)]
        answers[part] = await asyncio.gather(*(read(stream) for stream in streams))

    threads = [threading.Thread(target=run, args=(main(part),)) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    for part in (0, 1):
        wanted = [one.outputs[0].token_ids for one in alone[part::2]]
        assert [answer.token_ids for answer in answers[part]] == wanted


# ---- leaving early --------------------------------------------------------------------------------------------------


async def leave_by_break(llm: AsyncLLM) -> None:
    async for _ in llm.generate("the cat", LONG):
        break


async def leave_by_aclose(llm: AsyncLLM) -> None:
    stream = llm.generate("the cat", LONG)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_cancel(llm: AsyncLLM) -> None:
    task = asyncio.create_task(read(llm.generate("the cat", LONG)))
    await until(llm, lambda stats: stats.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(llm: AsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(llm.generate("the cat", LONG)), 0.05)


async def leave_by_collection(llm: AsyncLLM) -> None:
    stream = llm.generate("the cat", LONG)
    await until(llm, lambda stats: stats.num_running == 1)
    knot: list[Any] = [stream]
    knot.append(knot)
    del stream, knot
    gc.collect()


async def leave_by_error(llm: AsyncLLM) -> None:
    with pytest.raises(KeyError):
        async for _ in llm.generate("the cat", LONG):
            raise KeyError


async def leave_by_abort(llm: AsyncLLM) -> None:
    stream = llm.generate("the cat", LONG, request_id="mine")
    await anext(stream)
    assert await llm.abort("mine")
    stats = llm.stats()
    assert (stats.num_running, stats.kv_open_sequences) == (0, 0)  # free when abort returns
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].finish_reason == "abort"
    assert not await llm.abort("mine")


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_aclose,
        leave_by_cancel,
        leave_by_timeout,
        leave_by_collection,
        leave_by_error,
        leave_by_abort,
    ],
    ids=lambda leave: leave.__name__,
)
def test_a_request_that_is_left_is_gone_within_a_round(
    llm: AsyncLLM, leave: Callable[[AsyncLLM], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        await leave(llm)
        rounds = llm.stats().rounds
        await all_is_free(llm)
        # One round may have begun when it was left, and the figures may be those of the round before.
        assert llm.stats().rounds <= rounds + 2

    run(main())


def test_a_request_left_while_it_waits_is_never_run(make: Make) -> None:
    llm = make(placement="inline", max_num_seqs=1)

    async def main() -> None:
        first = llm.generate("the cat", LONG)
        await anext(first)
        waiting = [llm.generate("the mat", LONG, request_id=f"waiting {i}") for i in range(3)]
        assert llm.stats().num_waiting == 3
        assert await llm.abort("waiting 1")
        assert [chunk.finish_reason async for chunk in waiting[1]] == ["abort"]
        waiting.clear()
        await until(llm, lambda stats: stats.num_waiting == 0)
        assert llm.stats().num_running == 1
        await first.aclose()
        await all_is_free(llm)
        assert llm.stats().prefix_queries == 1  # only the first was taken up

    run(main())


@pytest.mark.parametrize("settings", [{"placement": "inline"}, {"placement": "process"}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_cancelling_at_random_times_leaves_nothing_behind(make: Make, settings: dict[str, Any], seed: int) -> None:
    llm, rng = make(**settings), random.Random(seed)

    async def ask(prompt: str) -> None:
        await asyncio.wait_for(read(llm.generate(prompt, LONG)), rng.random() * 0.15)

    async def main() -> None:
        prompts = [prompt for prompt, _ in random_requests(24, seed)]
        results = await asyncio.gather(*(ask(prompt) for prompt in prompts), return_exceptions=True)
        assert any(isinstance(result, TimeoutError) for result in results)
        assert all(result is None or isinstance(result, TimeoutError) for result in results)
        await all_is_free(llm)
        assert (await read(llm.generate("the cat", GREEDY))).finish_reason in ("stop", "length")

    run(main())


# ---- slow readers ---------------------------------------------------------------------------------------------------


def test_an_unread_stream_holds_nobody_up_and_comes_in_one_piece(llm: AsyncLLM) -> None:
    params = GREEDY.replace(max_tokens=200, ignore_eos=True)

    async def main() -> None:
        unread = llm.generate("the cat", params)
        read_through = await read(llm.generate("the cat", params))
        await until(llm, lambda stats: stats.num_running == 0)
        chunks = [chunk async for chunk in unread]
        assert len(chunks) == 1
        assert (chunks[0].text, chunks[0].token_ids) == (read_through.text, read_through.token_ids)
        assert chunks[0].finish_reason == "length"

    run(main())


def test_what_is_read_never_falls_when_a_request_has_ended(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llm.host.engine), "num_read", lambda *_: said.pop(0))
    said = [(0, 0), (512, 64), (0, 0)]

    async def main() -> list[tuple[int, int]]:
        stream = llm.generate("the cat", GREEDY)
        reads = [stream.num_read for _ in range(3)]
        await read(stream)
        return reads

    assert run(main()) == [(0, 0), (512, 64), (512, 64)]


def test_what_is_told_of_tokens_is_not_lost_by_a_slow_reader(llm: AsyncLLM) -> None:
    async def main() -> tuple[StreamChunk, list[StreamChunk]]:
        params = GREEDY.replace(logprobs=2, shows_tree=True, presence_penalty=0.5)
        slow = llm.generate("the cat", params)
        await until(llm, lambda stats: stats.num_running == 1)
        await until(llm, lambda stats: stats.num_running == 0)
        whole = await anext(slow)
        return whole, [chunk async for chunk in llm.generate("the cat", params)]

    whole, chunks = run(main())
    assert [one.token_id for one in whole.logprobs] == list(whole.token_ids)
    assert len(whole.origins) == len(whole.alternatives) == len(whole.token_ids)
    for one, other in zip(whole.logprobs, [one for chunk in chunks for one in chunk.logprobs], strict=True):
        assert (one.token_id, one.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))


def test_two_readers_of_one_stream_are_refused_and_the_first_goes_on(make: Make) -> None:
    llm = make(placement="inline", max_num_seqs=1)

    async def main() -> None:
        before = llm.generate("the mat", LONG)
        stream = llm.generate("the cat", GREEDY)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(SettingsError, match="one task"):
            await anext(stream)
        await before.aclose()
        assert (await first).token_ids

    run(main())


# ---- mistakes and failures ------------------------------------------------------------------------------------------


def test_a_bad_prompt_is_refused_before_anything_is_queued(llm: AsyncLLM) -> None:
    async def main() -> None:
        for prompt in ("", [], [10**6], "the cat " * 5000):
            with pytest.raises(PromptError):
                llm.generate(prompt, GREEDY)
        for prediction in ([10**6], [-1], [True], "the cat"):
            with pytest.raises(SettingsError, match="prediction must be token ids from 0 to"):
                llm.generate("the cat", GREEDY, prediction=prediction)
        assert llm.stats().num_waiting == 0
        await all_is_free(llm)

    run(main())


def test_a_name_in_use_is_refused_and_free_again_afterwards(llm: AsyncLLM) -> None:
    async def main() -> None:
        stream = llm.generate("the cat", GREEDY, request_id="mine")
        assert stream.request_id == "mine"
        with pytest.raises(SettingsError, match="mine"):
            llm.generate("the mat", GREEDY, request_id="mine")
        await read(stream)
        await read(llm.generate("the mat", GREEDY, request_id="mine"))
        assert not await llm.abort("never heard of")

    run(main())


def test_generate_outside_an_event_loop_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(SettingsError, match="event loop"):
        llm.generate("the cat", GREEDY)


def test_a_stream_is_read_in_its_own_loop(llm: AsyncLLM) -> None:
    async def begin() -> RequestStream:
        return llm.generate("the cat", GREEDY)

    stream = run(begin())
    with pytest.raises(SettingsError, match="event loop"):
        run(read(stream))


def test_a_request_that_the_model_fails_for_raises_its_error_and_the_others_go_on(own_llm: AsyncLLM) -> None:
    runner, bad_id = own_llm.host.runner, 77
    forward = runner.forward

    def fail_on_bad_prompts(extensions: Any) -> Any:
        if any(bad_id in extension.token_ids for extension in extensions):
            raise RuntimeError("broken weights")
        return forward(extensions)

    runner.forward = fail_on_bad_prompts  # type: ignore[method-assign]

    async def main() -> None:
        good, bad = own_llm.generate([2, 3, 4], LONG), own_llm.generate([2, bad_id], GREEDY)
        await anext(good)
        with pytest.raises(TargetError, match="broken weights"):
            await read(bad)
        await anext(good)
        assert own_llm.stats().num_failed == 1
        await good.aclose()
        await all_is_free(own_llm)

    run(main())


def test_a_text_that_cannot_be_written_ends_its_own_request_and_the_others_go_on(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = TextStream.take

    def fail_at_the_end(text: TextStream, token_ids: Any, *, is_end: bool) -> str:
        if is_end:
            raise UnicodeError("no such character")
        return take(text, token_ids, is_end=is_end)

    monkeypatch.setattr(TextStream, "take", fail_at_the_end)

    async def main() -> None:
        good = llm.generate("the mat", LONG)
        await anext(good)
        with pytest.raises(TargetError, match="the text of this request cannot be written: UnicodeError: no such"):
            await read(llm.generate("the cat", GREEDY))
        await anext(good)
        await good.aclose()
        await all_is_free(llm)

    run(main())


def test_when_the_engine_dies_every_waiter_and_every_later_call_is_told(own_llm: AsyncLLM) -> None:
    engine = own_llm.host.engine
    step, is_broken = engine.step, threading.Event()

    def break_down() -> Any:
        if is_broken.is_set():
            raise ZeroDivisionError("a bug")
        return step()

    engine.step = break_down  # type: ignore[method-assign]

    async def main() -> None:
        readers = [asyncio.create_task(read(own_llm.generate("the cat", LONG))) for _ in range(3)]
        unread = own_llm.generate("the mat", LONG, request_id="unread")
        await until(own_llm, lambda stats: stats.num_running == 4)
        is_broken.set()
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, WorkerError)
            assert "ZeroDivisionError: a bug" in str(result)
            assert isinstance(result.__cause__, ZeroDivisionError)
        with pytest.raises(WorkerError, match="a bug"):
            await read(unread)
        with pytest.raises(WorkerError, match="a bug"):
            own_llm.generate("the cat", GREEDY)
        with pytest.raises(WorkerError, match="a bug"):
            await own_llm.abort("unread")
        with pytest.raises(WorkerError, match="a bug"):
            own_llm.stats()

    run(main())


def test_an_abort_under_way_when_the_engine_dies_is_told_too(own_llm: AsyncLLM) -> None:
    engine, began, may_die = own_llm.host.engine, threading.Event(), threading.Event()

    def die_slowly() -> Any:
        began.set()
        may_die.wait(TIMEOUT_S)
        raise ZeroDivisionError("a bug")

    engine.step = die_slowly  # type: ignore[method-assign]

    async def main() -> None:
        stream = own_llm.generate("the cat", GREEDY, request_id="mine")
        await asyncio.to_thread(began.wait, TIMEOUT_S)
        abort = asyncio.create_task(own_llm.abort("mine"))
        await asyncio.sleep(0)
        may_die.set()
        with pytest.raises(WorkerError, match="a bug"):
            await abort
        with pytest.raises(WorkerError, match="a bug"):
            await read(stream)

    run(main())


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"placement": "inline"}, {"placement": "thread"}], ids=str)
def test_shutdown_ends_everything_and_tells_those_who_wait(pair: Pair, settings: dict[str, Any]) -> None:
    async def main() -> None:
        async with make_llm(pair, **settings) as llm:
            reader = asyncio.create_task(read(llm.generate("the cat", LONG)))
            await until(llm, lambda stats: stats.num_running == 1)
        with pytest.raises(WorkerError, match="shut down"):
            await reader
        with pytest.raises(WorkerError, match="shut down"):
            llm.generate("the cat", GREEDY)
        await llm.shutdown()
        assert not llm._driver._thread.is_alive()
        link_thread = getattr(llm.host.link, "_thread", None)
        assert link_thread is None or not link_thread.is_alive()

    run(main())


def test_whoever_waits_for_the_end_of_an_engine_is_told_why_it_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with make_llm(pair, placement="inline") as llm:
            impatient = asyncio.create_task(llm.ended())
            waiting = asyncio.create_task(llm.ended())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(impatient, 0.01)
            monkeypatch.setattr(llm.host.engine, "step", lambda: 1 / 0)
            with pytest.raises(WorkerError, match="has died"):
                await read(llm.generate("the cat", GREEDY))
            assert isinstance((await waiting).__cause__, ZeroDivisionError)
        async with make_llm(pair, placement="inline") as llm:
            waiting = asyncio.create_task(llm.ended())
            await asyncio.sleep(0)
            await llm.shutdown()
            assert (await waiting).__cause__ is None
            assert (await llm.ended()).__cause__ is None

    run(main())


def test_an_engine_that_nobody_holds_ends_by_itself(pair: Pair) -> None:
    async def main() -> tuple[Any, threading.Thread]:
        stream = make_llm(pair, placement="inline").generate("the cat", GREEDY)
        assert (await read(stream)).token_ids  # whoever reads a stream holds its engine
        return weakref.ref(stream._llm), stream._llm._driver._thread

    llm, thread = run(main())
    gc.collect()
    assert llm() is None
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_loop_that_closes_with_a_request_open_harms_nobody(llm: AsyncLLM) -> None:
    async def begin() -> RequestStream:
        stream = llm.generate("the cat", LONG)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        return llm.generate("the mat", GREEDY.replace(max_tokens=200, ignore_eos=True))

    stream = run(begin())

    async def go_on() -> None:
        assert (await read(llm.generate("the cat", GREEDY))).token_ids
        await until(llm, lambda stats: stats.num_running == 0)

    run(go_on())
    del stream


def test_the_public_name_is_this_class() -> None:
    assert PUBLIC_ASYNC_LLM is AsyncLLM
