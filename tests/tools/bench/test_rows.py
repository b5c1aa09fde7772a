"""A row counts tokens up to and with the stop token, and notes when each of them came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card import LLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.models.facts import end_token_ids
from card.models.loading import load_tokenizer
from card.tools.bench.rows import CardRow
from card.tools.bench.transformers_rows import TransformersRow, up_to_stop
from tests.pair import Pair

END = 9
tokens = st.lists(st.integers(0, 12), min_size=1, max_size=30)


@given(ids=tokens, sizes=st.lists(st.integers(1, 6), min_size=30, max_size=30))
def test_what_a_pass_made_beyond_the_stop_token_does_not_count(ids: list[int], sizes: list[int]) -> None:
    times, done = [], 0
    for i, size in enumerate(sizes):
        done = min(len(ids), done + size)
        times.append((float(i), done))
        if done == len(ids):
            break
    kept, kept_times = up_to_stop(ids, tuple(times), {END})
    expected = ids[: ids.index(END) + 1] if END in ids else ids
    assert list(kept) == expected
    assert kept_times[-1][1] == len(expected)
    assert [at for at, _ in kept_times] == [at for at, _ in times][: len(kept_times)]
    assert all(count < len(expected) for _, count in kept_times[:-1])


@pytest.fixture(scope="module")
def models(pair: Pair) -> tuple[Any, Any, Any]:
    return load_model(pair.target), load_model(pair.draft), load_tokenizer(pair.target)


def rows_of(models: tuple[Any, Any, Any], llm: LLM) -> list[CardRow | TransformersRow]:
    target, draft, tokenizer = models
    end_ids = end_token_ids(target, tokenizer)
    theirs = {"assistant": draft, "num_assistant_tokens": 5}
    return [
        CardRow("sps", llm, (), None),
        TransformersRow("plain", target, end_ids, ()),
        TransformersRow("assisted", target, end_ids, (), **theirs),
    ]


def test_all_rows_count_alike_and_end_at_the_stop_token(models: tuple[Any, Any, Any]) -> None:
    """The tiny target never ends by itself, so a token that it writes is made an end token."""
    target, draft, tokenizer = models
    prompt = tokenizer.encode("the cat sat on")
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=24).resolved()
    with LLM(target, draft, tokenizer=tokenizer, method="sps", policy="fixed") as llm:
        texts = {row.decode(prompt, params).token_ids for row in rows_of(models, llm)}
        (text,) = texts
        assert len(text) == 24
        stop = next(i for i in range(4, 24) if text[i] not in text[:i])
        before = target.generation_config.eos_token_id
        target.generation_config.eos_token_id = [*before, text[stop]]
        try:
            stopping = params.replace(stop_token_ids=(text[stop],))
            for row in rows_of(models, llm):
                decoded = row.decode(prompt, stopping)
                assert decoded.token_ids == text[: stop + 1]
                counts = [count for _, count in decoded.token_times]
                assert counts[-1] == stop + 1 and counts == sorted(set(counts))
                assert decoded.decode_tokens == stop + 1 - counts[0]
                assert 0 < decoded.prefill_s <= decoded.prefill_s + decoded.decode_s <= decoded.wall_s
                if decoded.stats is not None:
                    assert decoded.stats.num_new_tokens == stop + 1 and counts[0] == 1
        finally:
            target.generation_config.eos_token_id = before


class OvershootingModel:
    """Writes two tokens a pass and notices its end token only after the pass."""

    device = "cpu"
    config = SimpleNamespace(_attn_implementation="eager")

    def generate(self, inputs: torch.Tensor, *, streamer: Any, **_: Any) -> torch.Tensor:
        passes = [[4, 5], [6, END], [7, 8]]
        for token_ids in (inputs[0].tolist(), *passes):
            streamer.put(torch.tensor(token_ids))
        return torch.cat([inputs, torch.tensor([[4, 5, 6, END, 7, 8]])], dim=1)


def test_tokens_that_transformers_made_beyond_its_end_token_do_not_count() -> None:
    row = TransformersRow("plain", OvershootingModel(), frozenset({END}), ())  # type: ignore[arg-type]
    decoded = row.decode([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8).resolved())
    assert decoded.token_ids == (4, 5, 6, END)
    assert [count for _, count in decoded.token_times] == [2, 4] and decoded.decode_tokens == 2
