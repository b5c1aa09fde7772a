"""The rows of a comparison: each decodes one prompt with one method on stated cores and records the time of each token.

Ours run through `card.LLM`; those of transformers (`transformers_rows.py`) run through its own ``generate`` on the same
model objects. All are timed by the same clock, from outside.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from card.api.llm import LLM
from card.config import DraftSettings, ResolvedParams
from card.config.registry import own_value
from card.engine.metrics import RequestStats
from card.engine.trace import Trace
from card.machine.threads import CoreSet, pinned

SETTLE_S = 0.03  # torch's idle threads spin for about 10 ms, on a core that the next row may use
SHOWN_DRAFT_SETTINGS = (
    "verify",
    "growth",
    "beam_width",
    "branch",
    "budget",
    "min_verify_prob",
    "lead",
    "max_wait_s",
    "min_depth",
    "waits_after_miss",
    "min_path_logprob",
    "coupled_noise",
)
_OF_GROWTH = {"branch": "branch_below", "fan-out": "fan_out"}  # settings that one growth alone reads

PromptIds = Sequence[Sequence[int]]
TokenTimes = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """One prompt decoded once. Times are seconds."""

    token_ids: tuple[int, ...]  # the stop token included
    token_times: TokenTimes  # since the start, tokens so far: one entry per target pass
    wall_s: float
    cpu_s: float  # processor time of this process, all its threads; a drafter's own process is not in it
    stats: RequestStats | None  # of our own methods

    @property
    def prefill_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0][0]

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.token_times[-1][0] - self.token_times[0][0]

    @property
    def decode_tokens(self) -> int:
        """Tokens of decoding: without those of the first pass, which reads the prompt."""
        return len(self.token_ids) - self.token_times[0][1]


class Row(ABC):
    """One method on stated cores."""

    name: str
    settings: Mapping[str, Any]

    @abstractmethod
    def decode(self, prompt_ids: Sequence[int], params: ResolvedParams) -> Decoded:
        """Decode one prompt. Raises: CardError if the request fails."""

    def traced(self, prompt_ids: Sequence[int], params: ResolvedParams) -> Trace | None:
        """Decode one prompt once more and return its events; None where they cannot be recorded."""
        return None


class CardRow(Row):
    """One of our methods. Rows that differ in draft settings alone share an LLM, hence one drafter process."""

    def __init__(self, name: str, llm: LLM, cores: tuple[int, ...], draft: DraftSettings | None) -> None:
        """Use ``draft`` as the user's settings, which the method completes; None uses the LLM's own.

        Args:
            cores: where this thread decodes; under the tuned policy, those that it may choose from.
        """
        self.name = name
        self._llm = llm
        self._draft = None if draft is None else llm.method.shape(draft)
        self._core_set = core_set(cores, llm.settings.threads)
        self.settings = self._describe(cores)

    def _describe(self, cores: tuple[int, ...]) -> dict[str, Any]:
        """Return the settings, without what the tuned policy chooses while it runs."""
        engine, method = self._llm.settings, self._llm.method
        settings: dict[str, Any] = {"method": method.name, "cores": list(cores), "threads": engine.threads}
        if writers := [*(engine.writers or ()), *self._llm.host.plan.writers]:
            settings["writers"] = list(dict.fromkeys(writers))
        if method.is_tuned and engine.policy == "auto" and self._draft is None:
            return {**settings, "policy": engine.policy}
        if not method.needs_draft:
            return settings
        draft = self._draft or self._llm.draft_settings
        placement = "server" if engine.draft_address else engine.placement or method.placement
        settings |= {"policy": engine.policy, "placement": placement, "draft_cores": list(engine.draft_cores or ())}
        settings |= {name: getattr(draft, name) for name in SHOWN_DRAFT_SETTINGS}
        if draft.growth in _OF_GROWTH:
            settings[_OF_GROWTH[draft.growth]] = getattr(draft, _OF_GROWTH[draft.growth])
        if placement == "inline" or method.length_from_latencies:
            settings["num_speculative_tokens"] = draft.num_speculative_tokens
        if method.length_from_latencies and self._draft is None:
            settings["length_from"] = "latencies"  # target pass / drafter pass, measured when the row was started
        return settings | {name: own_value(engine, name) for name in method.reads}

    def decode(self, prompt_ids: Sequence[int], params: ResolvedParams) -> Decoded:
        """Decode one prompt."""
        if self._draft is not None:
            self._llm.draft_settings = self._draft
        self._llm.reset_prefix_cache()  # each prompt returns in every repeat
        token_ids: list[int] = []
        times: list[tuple[float, int]] = []
        stats: RequestStats | None = None
        with pinned(self._core_set):  # also between rounds, where the library pins nothing
            time.sleep(SETTLE_S)
            cpu_before, started = time.process_time(), time.perf_counter()
            for chunk in self._llm.stream(list(prompt_ids), params):
                token_ids += chunk.token_ids
                if chunk.token_ids:
                    times.append((time.perf_counter() - started, len(token_ids)))
                stats = chunk.stats
            wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_before
        return Decoded(tuple(token_ids), tuple(times), wall_s, cpu_s, stats)

    def traced(self, prompt_ids: Sequence[int], params: ResolvedParams) -> Trace:
        """Decode one prompt with its events recorded. Raises: as `decode`."""
        with self._llm.trace() as trace:
            self.decode(prompt_ids, params)
        return trace


def core_set(cores: tuple[int, ...], threads: int | None) -> CoreSet:
    """Return a place on these cores; on a system that cannot pin threads, one with their number of threads."""
    return CoreSet(cores if hasattr(os, "sched_getaffinity") else (), threads)
