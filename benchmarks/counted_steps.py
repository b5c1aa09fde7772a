"""Answers counted step by step: what a benchmark of drafts reports where seconds would say little."""

from __future__ import annotations

from card import LLM, SamplingParams


def steps_of(llm: LLM, request_id: int, question: str, max_tokens: int) -> tuple[list[int], list[int]]:
    """Return the accepted tokens of each step of an answer, and its tokens."""
    engine, params = llm.host.engine, SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved()
    engine.add(llm.host.make_request([{"role": "user", "content": question}], params, request_id).checked)
    accepted: list[int] = []
    token_ids: list[int] = []
    while engine.has_work:
        for update in engine.step():
            accepted.append(len(update.token_ids) - 1)
            token_ids += update.token_ids
    return accepted[1:], token_ids  # the first token comes of the prompt


def share_to_depth(steps: list[int], deepest: int) -> list[float]:
    """Return, for each depth from 1 on, the share of steps that accepted so many tokens, in thousandths."""
    return [round(sum(count >= depth for count in steps) / len(steps), 3) for depth in range(1, deepest + 1)]
