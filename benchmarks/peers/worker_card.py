"""Worker for our own rows and those of transformers, made and timed as `card bench` makes and times them."""

from __future__ import annotations

import time
from typing import Any

import transformers
from worker_protocol import Batch, Decoded, serve

import card
from card.api.llm import LLM
from card.bench.environment import MEASURED_START
from card.bench.lineup import Lineup, LineupSettings, PairSpec
from card.bench.names import needs_draft, spec_of
from card.bench.rows import Row
from card.config import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


class Card:
    """The rows of one pair in one dtype. They share the models, so all of them come up with the first one."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._lineup: Lineup | None = None
        self._rows: dict[str, Row] = {}
        self._engines: dict[str, LLM] = {}  # for several requests at once

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Remember what to run; models are loaded with the first row."""
        self._job = job
        return {"version": transformers.__version__ if job["peer"] == "transformers" else card.__version__}

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Bring the rows up; draft lengths are the fastest on the first prompts, or what they were before.

        Several requests at once have engines of their own.
        """
        if at_once := option.get("at_once"):
            self._engines[_key(method, at_once)] = self._engine(method, at_once)
            return option
        if self._lineup is None:
            job = self._job
            settings = LineupSettings(params=_GREEDY, cores=tuple(job["cores"]), dtype=job["dtype"])
            pair = PairSpec(target=job["target"], draft=job["draft"])
            self._lineup = Lineup(job["methods"], pair, settings, lambda _: None)
            self._rows = {row.name: row for row in self._lineup.make_rows(prompts, job["known"])}
        return dict(self._rows[method].settings)

    def _engine(self, method: str, at_once: int) -> LLM:
        spec = spec_of(method)
        return LLM(
            self._job["target"],
            self._job["draft"] if needs_draft(method) else None,
            method=spec.method,
            dtype=self._job["dtype"],
            cores=tuple(self._job["cores"]),
            max_num_seqs=at_once,
            **MEASURED_START,
            **spec.engine,
        )

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""
        done = self._rows[method].decode(prompt_ids, _GREEDY.replace(max_tokens=max_tokens))
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
        """Decode several prompts: all are submitted, and the engine runs ``at_once`` of them."""
        engine = self._engines[_key(method, option["at_once"])]
        engine.reset_prefix_cache()
        params = _GREEDY.replace(max_tokens=max_tokens)
        started = time.perf_counter()
        outputs = engine.generate(prompts, params)
        wall_s = time.perf_counter() - started
        return Batch(token_ids=[list(output.outputs[0].token_ids) for output in outputs], wall_s=wall_s)

    def release(self, method: str, option: dict[str, Any]) -> None:
        """End an engine for several requests at once. Rows of single requests share what they run on, and stay."""
        if at_once := option.get("at_once"):
            self._engines.pop(_key(method, at_once)).close()

    def close(self) -> None:
        """End drafters and let the models go."""
        for engine in self._engines.values():
            engine.close()
        if self._lineup is not None:
            self._lineup.close()


def _key(method: str, at_once: int) -> str:
    return f"{method} {at_once}"


if __name__ == "__main__":
    serve(Card())
