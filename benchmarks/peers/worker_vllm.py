"""Worker for vLLM on a CPU: one engine, in this process and stepped by hand, so that each step can be timed."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from worker_protocol import Batch, Decoded, serve, up_to_end

_KV_CACHE_GB = "1"


class Vllm:
    """One engine. Another method or draft length is another worker's."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._engine: Any = None
        self._request_ids = itertools.count()

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Remember what to run and tell vLLM where, before it is imported."""
        self._job = job
        os.environ.pop("OMP_NUM_THREADS", None)  # it binds its threads itself
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, job["cores"]))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = _KV_CACHE_GB
        os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm

        return {"version": vllm.__version__}

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Load the engine."""
        from vllm import LLM

        speculation: dict[str, Any] = {}
        if method == "draft":
            speculation = {"method": "draft_model", "model": self._job["draft"]}
        elif method == "ngram":
            speculation = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        if speculation:
            speculation["num_speculative_tokens"] = option["draft_tokens"]
        llm = LLM(
            model=self._job["target"],
            dtype="bfloat16",
            max_model_len=self._job["context"],
            max_num_seqs=option.get("at_once", 1),
            enable_prefix_caching=False,
            speculative_config=speculation or None,
        )
        self._engine = llm.llm_engine
        return {**option, "threads": len(self._job["cores"])}

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""
        started = time.perf_counter()
        self._submit(prompt_ids, max_tokens)
        steps: list[tuple[float, list[int]]] = []  # when, and all tokens so far
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                steps.append((time.perf_counter(), list(output.outputs[0].token_ids)))
        steps = [step for step in steps if step[1]]
        (first_at, first), (last_at, last) = steps[0], steps[-1]
        return Decoded(
            token_ids=up_to_end(last, self._job["end_ids"]),
            prefill_s=first_at - started,
            decode_s=last_at - first_at,
            decode_tokens=len(last) - len(first),
        )

    def generate_many(
        self, method: str, option: dict[str, Any], prompts: list[list[int]], max_tokens: int, at_once: int
    ) -> Batch:
        """Decode several prompts: all are submitted, and the engine runs ``at_once`` of them."""
        started = time.perf_counter()
        names = [self._submit(prompt_ids, max_tokens) for prompt_ids in prompts]
        found: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        wall_s = time.perf_counter() - started
        return Batch(token_ids=[up_to_end(found[name], self._job["end_ids"]) for name in names], wall_s=wall_s)

    def _submit(self, prompt_ids: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        name = str(next(self._request_ids))
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, stop_token_ids=self._job["end_ids"], detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
        return name

    def release(self, method: str, option: dict[str, Any]) -> None:
        """Do nothing: the worker ends instead."""

    def close(self) -> None:
        """Do nothing: the engine lives in this process."""


if __name__ == "__main__":
    serve(Vllm())
