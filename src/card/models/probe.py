"""A target's fingerprint, by which what was trained for one is told from another of the same sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from card.models.torch_runner import TorchRunner

_NUM_PROBES = 8
_LEAST_LIKENESS = 0.98  # cosine of the embeddings: dtypes round them, other training moves them further


def embedding_probe(target: TorchRunner) -> Tensor:
    """Return the embeddings of 8 tokens from all over the vocabulary, [8 * D] float32 on the CPU."""
    return target.embeddings(probed_tokens(target.vocab_size)).float().cpu().flatten()


def probed_tokens(vocab_size: int) -> list[int]:
    """Return the tokens whose embeddings are compared."""
    return [round(i * (vocab_size - 1) / (_NUM_PROBES - 1)) for i in range(_NUM_PROBES)]


def probe_difference(own: Tensor, given: Tensor) -> str:
    """Return in words why two probes are of different targets; empty if they are not."""
    if own.shape != given.shape:
        return f"its target has width {len(own) // _NUM_PROBES}, this one {len(given) // _NUM_PROBES}"
    likeness = torch.nn.functional.cosine_similarity(own, given, dim=0)
    return "" if likeness >= _LEAST_LIKENESS else "the embeddings of its target are others"
