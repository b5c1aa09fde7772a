"""Worker for OpenVINO GenAI: one pipeline per method and attention backend, with its own times."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker_protocol import Batch, Decoded, serve, up_to_end

_KV_CACHE_GB = 1  # of pipelines with paged attention


class OpenVino:
    """Pipelines by method and attention backend."""

    def __init__(self) -> None:
        self._job: dict[str, Any] = {}
        self._pipelines: dict[str, Any] = {}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Remember what to run."""
        self._job = job
        return {"version": openvino_genai.__version__}

    def prepare(self, method: str, option: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
        """Load a pipeline unless options of generation alone differ from one that is there."""
        key = _key(method, option)
        if key not in self._pipelines:
            how: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(self._job["cores"])}
            if method == "draft":
                how["draft_model"] = openvino_genai.draft_model(self._job["draft"], "CPU", **how)
            if method == "lookup":
                how["prompt_lookup"] = True
            if method != "plain" or option["attention"] == "PA":
                scheduler = openvino_genai.SchedulerConfig()
                scheduler.cache_size = _KV_CACHE_GB
                scheduler.enable_prefix_caching = False
                how["scheduler_config"] = scheduler
            else:
                how["ATTENTION_BACKEND"] = option["attention"]
            self._pipelines[key] = openvino_genai.LLMPipeline(self._job["target"], "CPU", **how)
        return {**option, "threads": len(self._job["cores"])}

    def generate(self, method: str, option: dict[str, Any], prompt_ids: list[int], max_tokens: int) -> Decoded:
        """Decode one prompt greedily."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.stop_token_ids = set(self._job["end_ids"])
        config.eos_token_id = self._job["end_ids"][0]
        if method != "plain":
            config.num_assistant_tokens = option["draft_tokens"]
        if method == "lookup":
            config.max_ngram_size = 3
        inputs = openvino.Tensor(np.array([prompt_ids], dtype=np.int64))
        result = self._pipelines[_key(method, option)].generate(inputs, config)
        token_ids = list(result.tokens[0])
        metrics = result.perf_metrics
        prefill_s = metrics.get_ttft().mean / 1e3
        return Decoded(
            token_ids=up_to_end(token_ids, self._job["end_ids"]),
            prefill_s=prefill_s,
            decode_s=metrics.get_generate_duration().mean / 1e3 - prefill_s,
            decode_tokens=len(token_ids) - 1,
            accepted=result.extended_perf_metrics.get_num_accepted_tokens() if method == "draft" else None,
        )

    def generate_many(
        self, method: str, option: dict[str, Any], prompts: list[list[int]], max_tokens: int, at_once: int
    ) -> Batch:
        """Raise: requests at once are not compared for this peer."""
        raise NotImplementedError("requests at once are not measured with OpenVINO GenAI")

    def release(self, method: str, option: dict[str, Any]) -> None:
        """Let a pipeline of an attention backend go; those of other draft lengths are the same one."""
        if method == "plain":
            del self._pipelines[_key(method, option)]

    def close(self) -> None:
        """Let all pipelines go."""
        self._pipelines.clear()


def _key(method: str, option: dict[str, Any]) -> str:
    return json.dumps([method, option.get("attention")])


if __name__ == "__main__":
    serve(OpenVino())
