"""Scores of given texts: those of a plain forward pass, whatever runs beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from card.api.async_llm import AsyncLLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.errors import PromptError, TargetError, WorkerError
from card.tree.sampling import TokenLogprobs
from tests.pair import MAX_POSITIONS, Pair

pytestmark = pytest.mark.timeout(180)
TEXT = tuple((7 * i * i + 3 * i) % 300 + 2 for i in range(150))
LONG = SamplingParams(temperature=0.0, max_tokens=3000, seed=0, ignore_eos=True)


@pytest.fixture
def llm(pair: Pair) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(pair.target, pair.draft, dtype="float32", placement="inline", policy="fixed", prefill_chunk=32)
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def logprobs(pair: Pair) -> torch.Tensor:
    """[T, V] of TEXT, by transformers."""
    model = load_model(pair.target, dtype="float32")
    with torch.inference_mode():
        return model(torch.tensor([TEXT])).logits[0].log_softmax(-1)


def check(scores: tuple[TokenLogprobs, ...], token_ids: tuple[int, ...], logprobs: torch.Tensor, num_top: int) -> None:
    assert [score.token_id for score in scores] == list(token_ids[1:])
    for position, score in enumerate(scores):
        row = logprobs[position]
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


async def all_is_free(llm: AsyncLLM) -> None:
    while llm.host.scorer.has_work or llm.stats().kv_open_sequences:
        await asyncio.sleep(0.005)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 65, 150])
def test_the_scores_are_those_of_one_plain_pass(llm: AsyncLLM, logprobs: torch.Tensor, length: int) -> None:
    check(run(llm.score(TEXT[:length], 3)), TEXT[:length], logprobs, 3)
    run(all_is_free(llm))


def test_texts_are_scored_beside_requests_and_neither_changes_the_other(llm: AsyncLLM, logprobs: torch.Tensor) -> None:
    async def main() -> tuple[list[Any], list[int], list[int]]:
        alone = [i async for chunk in llm.generate("the cat", LONG.replace(max_tokens=60)) for i in chunk.token_ids]
        stream = llm.generate("the cat", LONG.replace(max_tokens=60))
        scores = await asyncio.gather(*(llm.score(TEXT[: 40 + 10 * i], 2) for i in range(6)))
        return scores, alone, [i async for chunk in stream for i in chunk.token_ids]

    scores, alone, beside = run(main())
    assert beside == alone
    for i, one in enumerate(scores):
        check(one, TEXT[: 40 + 10 * i], logprobs, 2)


def test_texts_that_cannot_be_scored_are_refused_at_once(llm: AsyncLLM) -> None:
    for text, reason in (((), "at least one"), ((10**6,), "token ids must be"), ((5,) * (MAX_POSITIONS + 1), "holds")):
        with pytest.raises(PromptError, match=reason):
            run(llm.score(text))


def test_a_text_that_nobody_waits_for_any_more_costs_nothing_more(llm: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(llm.score(TEXT, 0)) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(await llm.score(TEXT[:5])) == 4
        await all_is_free(llm)

    run(main())


def test_a_pass_that_fails_fails_its_text_alone(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = llm.host.runner.forward, []

    def failing(extensions: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory\nand more")
        return forward(extensions)

    monkeypatch.setattr(llm.host.runner, "forward", failing)
    with pytest.raises(TargetError, match=r"failed for this text: RuntimeError: out of memory$"):
        run(llm.score(TEXT))
    assert len(run(llm.score(TEXT))) == len(TEXT) - 1


def test_who_waits_for_scores_hears_of_the_engines_end(llm: AsyncLLM) -> None:
    async def main() -> None:
        waiting = [asyncio.create_task(llm.score(TEXT)) for _ in range(30)]
        await asyncio.sleep(0)
        await llm.shutdown()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, WorkerError | tuple) for end in ends)
        assert any(isinstance(end, WorkerError) for end in ends)
        with pytest.raises(WorkerError):
            await llm.score(TEXT)

    run(main())
