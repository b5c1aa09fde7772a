"""Worker for our own rows: `card.LLM` as a user makes it, with the settings of the row and no others."""

from __future__ import annotations

import time
from typing import Any

from catalog import LONGEST_SPS, OWN_ROWS
from worker_protocol import Batch, Decoded, serve

import card
from card.api.llm import LLM
from card.config import DraftSettings, SamplingParams
from card.config.registry import find_method
from card.tools.bench.rows import CardRow

_GREEDY = SamplingParams(temperature=0.0).resolved()


class Card:
    """Rows of one pair in one dtype; those that differ in draft length alone share an engine."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._engines: dict[str, LLM] = {}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Remember what to run; models are loaded with the first row."""
        self._job = job
        return {"version": card.__version__}

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Bring the row's engine up."""
        key = _key(method, option)
        if key not in self._engines:
            self._engines[key] = self._engine(method, option)
        return {**self._row(method, option).settings, **option}

    def _engine(self, method: str, option: dict[str, Any]) -> LLM:
        row, settings = OWN_ROWS[method], dict[str, Any]()
        if row.has_all_cores:
            settings["threads"] = len(self._job["cores"])
        if row.length is not None:
            settings |= {"policy": "fixed", "num_speculative_tokens": LONGEST_SPS}
        if row.writers is not None:
            settings["writers"] = row.writers
        if at_once := option.get("at_once"):
            settings["max_num_seqs"] = at_once
        draft = self._job["draft"] if find_method(row.method).needs_draft else None
        return LLM(self._job["target"], draft, method=row.method, dtype=self._job["dtype"], **settings)

    def _row(self, method: str, option: dict[str, Any]) -> CardRow:
        length = OWN_ROWS[method].length
        draft = None if length is None else DraftSettings(num_speculative_tokens=length)
        return CardRow(method, self._engines[_key(method, option)], tuple(self._job["cores"]), draft)

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""
        done = self._row(method, option).decode(prompt_ids, _GREEDY.replace(max_tokens=max_tokens))
        return Decoded(
            token_ids=list(done.token_ids),
            prefill_s=done.prefill_s,
            decode_s=done.decode_s,
            decode_tokens=done.decode_tokens,
            accepted=done.stats.accepted_tokens if done.stats else None,
        )

    def generate_many(
        self, method: str, option: dict[str, Any], prompts: list[list[int]], max_tokens: int, at_once: int
    ) -> Batch:
        """Decode several prompts: all are submitted, and the engine runs as many at once as the option says."""
        engine = self._engines[_key(method, option)]
        if (length := OWN_ROWS[method].length) is not None:
            engine.draft_settings = engine.method.shape(DraftSettings(num_speculative_tokens=length))
        engine.reset_prefix_cache()
        params = _GREEDY.replace(max_tokens=max_tokens)
        started = time.perf_counter()
        outputs = engine.generate(prompts, params)
        wall_s = time.perf_counter() - started
        return Batch(token_ids=[list(output.outputs[0].token_ids) for output in outputs], wall_s=wall_s)

    def release(self, method: str, option: dict[str, Any]) -> None:
        """Keep the engine: others may share it, and one that nobody shares ends with its process."""

    def close(self) -> None:
        """End drafters and let the models go."""
        for engine in self._engines.values():
            engine.close()


def _key(method: str, option: dict[str, Any]) -> str:
    row = OWN_ROWS[method]
    return f"{row.method} {row.has_all_cores} {row.writers} {option.get('at_once')}"


if __name__ == "__main__":
    serve(Card())
