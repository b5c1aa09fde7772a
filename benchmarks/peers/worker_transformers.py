"""Worker for the rows of transformers, made and timed as `card bench` makes and times them."""

from __future__ import annotations

from typing import Any

import transformers
from worker_protocol import Batch, Decoded, serve

from card.config import SamplingParams
from card.tools.bench.lineup import Lineup, LineupSettings, PairSpec
from card.tools.bench.rows import Row

_GREEDY = SamplingParams(temperature=0.0).resolved()


class Transformers:
    """The rows of one pair in one dtype. They share the models, so all of them come up with the first one."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._lineup: Lineup | None = None
        self._rows: dict[str, Row] = {}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Remember what to run; models are loaded with the first row."""
        self._job = job
        return {"version": transformers.__version__}

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Bring the rows up; draft lengths are the fastest on the first prompts, or what they were before."""
        if self._lineup is None:
            job = self._job
            settings = LineupSettings(params=_GREEDY, cores=tuple(job["cores"]), dtype=job["dtype"])
            pair = PairSpec(target=job["target"], draft=job["draft"])
            self._lineup = Lineup(job["methods"], pair, settings, lambda _: None)
            self._rows = {row.name: row for row in self._lineup.make_rows(prompts, job["known"])}
        return dict(self._rows[method].settings)

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""
        done = self._rows[method].decode(prompt_ids, _GREEDY.replace(max_tokens=max_tokens))
        return Decoded(
            token_ids=list(done.token_ids),
            prefill_s=done.prefill_s,
            decode_s=done.decode_s,
            decode_tokens=done.decode_tokens,
        )

    def generate_many(
        self, method: str, option: dict[str, Any], prompts: list[list[int]], max_tokens: int, at_once: int
    ) -> Batch:
        """Rows of transformers have no continuous batches. Raises: NotImplementedError."""
        raise NotImplementedError("transformers' rows decode one request at a time")

    def release(self, method: str, option: dict[str, Any]) -> None:
        """Rows share what they run on, and stay."""

    def close(self) -> None:
        """Let the models go."""
        if self._lineup is not None:
            self._lineup.close()


if __name__ == "__main__":
    serve(Transformers())
