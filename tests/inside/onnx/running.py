"""Decode with an engine of ONNX Runtime GenAI, with CARD's candidates or without."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from card.onnx import SpeculativeEngine

_EVENTS = 256
_MAX_EVENTS_S = 300.0


def load_engine_model(folder: Path, num_threads: int = 1) -> Any:
    """Return the `og.Model` in a folder, which computes with so many threads."""
    import onnxruntime_genai as og

    config = og.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": num_threads}}}}))
    return og.Model(config)


@dataclass(slots=True)
class Decoded:
    """What came out, and how."""

    texts: list[list[int]]
    num_runs: int = 0
    wall_s: float = 0.0
    num_proposed: int = 0  # drafts, as the engine counts them
    num_accepted: int = 0
    told: Mapping[str, int] = field(default_factory=dict)  # accepted by writer, as CARD counts them
    restarts: int = 0
    is_up: bool = False


def decode(
    model: Any,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    at_once: int,
    card: Mapping[str, Any] | None,
    kill_at: int = -1,
    sampling: Mapping[str, Any] | None = None,
) -> Decoded:
    """Return the texts that follow the prompts.

    Args:
        model: an `og.Model` of the folder.
        at_once: most requests at once; others wait until one is over.
        card: settings of `SpeculativeEngine`; None leaves it out.
        kill_at: the run before which the drafter is killed.
        sampling: what to set of `og.TurnOptions`; None: greedy.
    """
    import onnxruntime_genai as og

    engine = og.Engine(model)
    drafts = None if card is None else SpeculativeEngine(engine, folder, **card)
    buffer = engine.create_event_buffer(_EVENTS)
    decoded = Decoded([[] for _ in prompts])
    running: dict[Any, int] = {}
    waiting = list(enumerate(prompts))
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < at_once:
            idx, prompt_ids = waiting.pop(0)
            request = engine.create_request()
            options = og.TurnOptions(request)
            options.set_max_generated_tokens(max_tokens)
            for name, value in (sampling or {}).items():
                getattr(options, f"set_{name}")(value)
            begin = request.begin_turn if drafts is None else lambda *given, new=request: drafts.begin_turn(new, *given)
            begin(np.asarray(prompt_ids, np.int32), options)
            running[request] = idx
        if decoded.num_runs == kill_at:
            assert drafts is not None
            os.kill(drafts.proposer.link.link.pid, signal.SIGKILL)
        for event in (engine if drafts is None else drafts).run(buffer):
            if event.flags & og.EngineEventFlags.TOKEN:
                decoded.texts[running[event.request]].append(int(event.token))
            if event.flags & og.EngineEventFlags.TURN_FINISHED:
                del running[event.request]
                event.request.close()
        decoded.num_runs += 1
        assert time.perf_counter() - began < _MAX_EVENTS_S
    decoded.wall_s = time.perf_counter() - began
    stats = engine.get_speculative_stats()
    decoded.num_proposed, decoded.num_accepted = stats["draft_tokens_proposed"], stats["draft_tokens_accepted"]
    if drafts is not None:
        assert drafts.proposer is not None
        decoded.told = dict(drafts.figures.accepted_by_writer)
        status = drafts.proposer.link.status
        decoded.restarts, decoded.is_up = status.num_restarts, status.state == "up"
        drafts.close()
    return decoded


def turns(
    model: Any, folder: Path, prompts: Sequence[Sequence[int]], card: Mapping[str, Any] | None
) -> list[list[int]]:
    """Return what one request says in each of its turns."""
    import onnxruntime_genai as og

    engine = og.Engine(model)
    drafts = None if card is None else SpeculativeEngine(engine, folder, **card)
    buffer, request = engine.create_event_buffer(_EVENTS), engine.create_request()
    texts: list[list[int]] = []
    for prompt_ids in prompts:
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(24)
        if drafts is None:
            request.begin_turn(np.array(prompt_ids, np.int32), options)
        else:
            drafts.begin_turn(request, prompt_ids, options)
        texts.append([])
        while engine.has_pending_requests():
            for event in (drafts or engine).run(buffer):
                if event.flags & og.EngineEventFlags.TOKEN:
                    texts[-1].append(int(event.token))
    if drafts is not None:
        assert engine.get_speculative_stats()["draft_tokens_accepted"] > 0
        drafts.close()
    return texts
