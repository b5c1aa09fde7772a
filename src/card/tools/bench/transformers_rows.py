"""Rows of transformers' own ``generate``, in a file of their own: ours run where torch is not installed.

With torch a process takes 230 MB more, so that it is imported for these rows alone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from card.config import ResolvedParams
from card.machine.threads import pinned
from card.tools.bench.rows import SETTLE_S, Decoded, Row, TokenTimes, core_set


@dataclass(slots=True)
class _Clock(BaseStreamer):
    """Records when transformers hands out tokens: first the prompt, then the tokens of each pass."""

    passes: list[tuple[float, int]] = field(default_factory=list)  # when, and how many

    def put(self, value: Tensor) -> None:
        """Record the tokens of a pass."""
        self.passes.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Do nothing: no token is held back."""

    def token_times(self, started: float) -> TokenTimes:
        """Return seconds since the start and tokens so far, pass by pass, without the prompt."""
        totals = accumulate(count for _, count in self.passes[1:])
        return tuple((at_s - started, total) for (at_s, _), total in zip(self.passes[1:], totals, strict=True))


class TransformersRow(Row):
    """transformers' own ``generate``, plain or with an assistant model, on the same weights."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        end_ids: frozenset[int],
        cores: tuple[int, ...],
        *,
        assistant: PreTrainedModel | None = None,
        num_assistant_tokens: int | None = None,
    ) -> None:
        """Take the models.

        Args:
            num_assistant_tokens: drafted each time, without a confidence threshold; None leaves the defaults.
        """
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self.name = name
        self._model = model
        self._end_ids = sorted(end_ids)
        self._core_set = core_set(cores, len(cores))
        self._assistant = assistant
        self._changes: dict[str, Any] = {}
        if num_assistant_tokens is not None:
            schedule = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            self._changes = {"num_assistant_tokens": num_assistant_tokens, **schedule}
        self._own_config = assistant.generation_config if assistant else None
        self.settings = {"cores": list(cores), "threads": len(cores), "attention": model.config._attn_implementation}
        if assistant is not None:
            self.settings = {**self.settings, "assistant": assistant_title(num_assistant_tokens)}

    def decode(self, prompt_ids: Sequence[int], params: ResolvedParams) -> Decoded:
        """Decode one prompt."""
        clock = _Clock()
        inputs = torch.tensor([list(prompt_ids)], device=self._model.device)
        if self._assistant is not None and self._own_config is not None:
            config = GenerationConfig.from_dict({**self._own_config.to_dict(), **self._changes})
            self._assistant.generation_config = config
        generate: Any = self._model.generate
        torch.manual_seed(params.seed)
        with pinned(self._core_set):
            time.sleep(SETTLE_S)
            cpu_before, started = time.process_time(), time.perf_counter()
            output = generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                assistant_model=self._assistant,
                streamer=clock,
                max_new_tokens=params.max_tokens,
                eos_token_id=self._end_ids or None,
                pad_token_id=self._end_ids[0] if self._end_ids else 0,
                **_sampling_options(params),
            )
            wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        token_ids = output[0, len(prompt_ids) :].tolist()
        ids, times = up_to_stop(token_ids, clock.token_times(started), self._end_ids)
        return Decoded(ids, times, wall_s, cpu_s, None)


def assistant_title(num_tokens: int | None) -> str:
    """Return a description of how transformers' assisted generation drafts."""
    return "defaults" if num_tokens is None else f"constant {num_tokens}"


def up_to_stop(
    token_ids: Sequence[int], token_times: TokenTimes, end_ids: Collection[int]
) -> tuple[tuple[int, ...], TokenTimes]:
    """Return tokens and their times to the first end token, included: later tokens of its pass do not count."""
    length = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in end_ids), len(token_ids))
    times: list[tuple[float, int]] = []
    for at_s, count in token_times:
        times.append((at_s, min(count, length)))
        if count >= length:
            break
    return tuple(token_ids[:length]), tuple(times)


def _sampling_options(params: ResolvedParams) -> dict[str, Any]:
    if params.temperature == 0.0:
        return {"do_sample": False}
    options = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    return {**options, "min_p": params.min_p} if params.min_p else options
