"""What the documents do with the public names: `make lint` checks it with the strictest types."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from card import (
    LLM,
    AsyncLLM,
    CardError,
    CompletionOutput,
    Content,
    DraftSettings,
    EngineStats,
    Grammar,
    LLMSettings,
    RequestOutput,
    RequestStats,
    SamplingParams,
    StreamChunk,
)

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TALK = [{"role": "user", "content": "Hi"}]


def parameters() -> list[SamplingParams]:
    """Return parameters in every form that is taken."""
    return [
        SamplingParams(),
        SamplingParams(stop="x"),
        SamplingParams(stop=["x", "y"], stop_token_ids=[1, 2]),
        SamplingParams(stop=("x",), temperature=0, top_p=None, max_tokens=5, n=2),
        SamplingParams(logit_bias={5: -100}, grammar=Grammar("regex", "[0-9]+"), logprobs=3),
        SamplingParams().replace(stop="x"),
    ]


def drafting() -> list[DraftSettings]:
    """Return draft settings in every form that is taken."""
    return [DraftSettings(fan_out=3, growth="fan-out"), DraftSettings(fan_out=[3, 1]), DraftSettings(budget=8)]


def text(folder: Path, settings: LLMSettings) -> str:
    """Ask in all ways in which one answer, several of them, and streams are asked for."""
    params = SamplingParams(max_tokens=5)
    with LLM(folder, "demo-draft", tokenizer="demo-target", fan_out=3, writers="beam", cores=[0]) as llm:
        outputs: list[RequestOutput] = llm.generate(["a", "b"], [params, params])
        outputs += llm.generate("a") + llm.generate([[1, 2], "a"], params) + llm.generate(np.array([[1, 2]]))
        outputs += llm.chat(TALK, params, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
        outputs += llm.chat([TALK, TALK])
        chunks: list[StreamChunk] = list(llm.stream(TALK, params, tools=TOOLS))
        chunks += llm.stream(np.array([1, 2]), params)
        completion: CompletionOutput = outputs[0].outputs[0]
        stats: EngineStats = llm.stats()
        figures: RequestStats = chunks[0].stats
        chunks += llm.stream(TALK, params, reads_parts=True)
        content = [piece.text for piece in chunks[-1].parts if isinstance(piece, Content)]
        llm.draft_settings = drafting()[0]
        ids: list[int] = llm.tokenizer.encode("a")
    settings = {**settings, "prefix_cache": folder, "cache_dir": folder, "judge": folder / "judge.safetensors"}
    with LLM("demo-target", **settings) as other:
        try:
            other.generate("a", params)
        except CardError as error:
            return str(error)
    told = f"{stats.num_waiting} {figures.target_passes} {content} {ids}"
    return f"{completion.text} {told} {chunks[-1].text} {parameters()[1].stop[0]}"


async def stream(llm: AsyncLLM) -> AsyncIterator[str]:
    """Stream an answer."""
    async for chunk in llm.generate(TALK, SamplingParams(stop="x"), request_id="tom", tools=TOOLS):
        yield chunk.text
