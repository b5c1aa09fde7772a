"""Facts of a target that a file trained for it keeps, so that another target is noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from card.kernels.number_types import Floats
from card.models.runner import RowRunner

_NUM_PROBES = 8
_LEAST_NORM = 1e-8
_LEAST_LIKENESS = 0.98  # cosine of the embeddings: dtypes round them, other training moves them further


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSizes:
    """Sizes of a target; of an inflated one, those of its original."""

    hidden_size: int  # D
    vocab_size: int
    num_parameters: int


def sizes_of(target: RowRunner) -> dict[str, Any]:
    """Return the fields of `TargetSizes`."""
    original = target.original
    return {
        "hidden_size": original.hidden_size,
        "vocab_size": target.vocab_size,
        "num_parameters": original.num_parameters,
    }


def embedding_probe(target: RowRunner) -> Floats:
    """Return the embeddings of 8 tokens from all over the vocabulary, [8 * D] float32."""
    return target.embeddings(probed_tokens(target.vocab_size)).ravel()


def probed_tokens(vocab_size: int) -> list[int]:
    """Return the tokens whose embeddings are compared."""
    return [round(i * (vocab_size - 1) / (_NUM_PROBES - 1)) for i in range(_NUM_PROBES)]


def probe_width(probe: Floats) -> int:
    """Return the width D of the embeddings in a probe."""
    return len(probe) // _NUM_PROBES


def probe_difference(stored: Floats, given: Floats) -> str:
    """Return in words why two probes are of different targets; empty if they are not."""
    if stored.shape != given.shape:
        return f"its target has width {probe_width(stored)}, this one {probe_width(given)}"
    likeness = float(stored @ given) / max(float(np.linalg.norm(stored) * np.linalg.norm(given)), _LEAST_NORM)
    return "" if likeness >= _LEAST_LIKENESS else "the embeddings of its target are others"


def target_difference(sizes: TargetSizes, target: RowRunner, probe: Floats | None = None) -> str:
    """Return in words why a target is not the one of these sizes and this probe, if there is one; empty if it is."""
    given = TargetSizes(**sizes_of(target))
    if sizes.vocab_size != given.vocab_size:
        return f"its vocabulary has {sizes.vocab_size} tokens, this one {given.vocab_size}"
    if sizes.hidden_size != given.hidden_size:
        return f"its target has width {sizes.hidden_size}, this one {given.hidden_size}"
    if probe is not None and (difference := probe_difference(probe, embedding_probe(target))):
        return difference
    if sizes.num_parameters != given.num_parameters:
        return f"its target has {sizes.num_parameters:,} parameters, this one {given.num_parameters:,}"
    return ""
