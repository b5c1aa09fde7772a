"""Load a draft model and find out what its passes cost: the first thing that a drafter outside the target does."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from card.messages import Ready
from card.models.fingerprint import tokenizer_fingerprint
from card.models.loading import context_limit, load_model, load_tokenizer, parameter_count
from card.models.protocol import Extension, LanguageModel
from card.models.torch_runner import TorchRunner
from card.writers.beam import BeamWriter

_MEASURED_TOKENS = (1, 4, 8, 16, 32)
_RUNS = 3
_MOST_MEASURING_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """Which draft model, and how much of it."""

    name: str  # a folder, a hub name, or demo-draft
    dtype: str
    device: str
    max_model_len: int  # the model's own limit counts if it is lower
    max_tree_rows: int
    warm_up_tokens: int  # most tokens of a usual pass
    kv_cache_bytes: int | None  # None: a few sequences of full length
    has_unknown_target: bool = False  # the target must be told which tokenizer this is


def load_drafter(draft: DraftModel) -> tuple[BeamWriter, Ready]:
    """Load and warm up the model; return its writer, and what targets are told of it.

    Raises: ModelError if it cannot be loaded; SettingsError if not one sequence fits into the memory.
    """
    model = load_model(draft.name, dtype=draft.dtype, device=draft.device)
    num_parameters = parameter_count(model)
    max_model_len = min(draft.max_model_len, context_limit(model))
    runner = TorchRunner(model, max_model_len=max_model_len, max_tree_rows=draft.max_tree_rows)
    runner.warm_up(draft.warm_up_tokens)
    ready = Ready(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        num_parameters=num_parameters,
        pass_s=measure_passes(runner),
        tokenizer=tokenizer_fingerprint(load_tokenizer(draft.name)) if draft.has_unknown_target else "",
    )
    return BeamWriter(runner, draft.kv_cache_bytes), ready


def measure_passes(model: LanguageModel) -> tuple[tuple[int, float], ...]:
    """Return (tokens, median seconds) of passes of a few sizes, the smallest first; fewer sizes if it takes long."""
    started = time.perf_counter()
    slot = model.open()
    measured = []
    for num_tokens in (n for n in _MEASURED_TOKENS if n <= model.max_model_len):
        if time.perf_counter() - started > _MOST_MEASURING_S:
            break
        measured.append((num_tokens, statistics.median(_pass_s(model, slot, num_tokens) for _ in range(_RUNS))))
    model.close(slot)
    return tuple(measured)


def _pass_s(model: LanguageModel, slot: int, num_tokens: int) -> float:
    started = time.perf_counter()
    (logits,) = model.forward([Extension(slot, [0] * num_tokens, range(-1, num_tokens - 1))])
    float(logits[-1, 0])  # waits for the device
    model.keep(slot, 0)
    return time.perf_counter() - started
