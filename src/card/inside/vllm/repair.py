"""Detect and repair a fault of vLLM 0.32.0 on CPUs.

vLLM gives each candidate the temperature, top-k and top-p of its request by `expand_batch_to_tokens`. The CPU backend's
kernel for that writes whole numbers into a copy, so the result is uninitialised memory. So sampled text has a wrong
distribution whenever candidates are verified, also those of vLLM's own ngram proposer. Greedy text is not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
Expand = Callable[..., Tensor]


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Return the value of each request once for each of its candidates.

    Args:
        x: [B] values.
        cu_num_tokens: [B] candidates of this request and of all before it.
        num_tokens: of all candidates, T.
        replace_from: a value that is replaced by ``replace_to``.
    Returns: [T] of the type of ``x``.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


def is_sound(expand: Expand) -> bool:
    """Return whether a function agrees with `expand_batch_to_tokens` on a few values of each used type."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32, torch.int64):
        values = (
            torch.tensor([7, 3, 0], dtype=dtype) / 2 if dtype.is_floating_point else torch.tensor([7, 3, 0]).to(dtype)
        )
        scratch = [torch.full((5,), 9, dtype=dtype) for _ in range(8)]  # so that new memory is not right by chance
        del scratch
        if not torch.equal(expand(values, ends, 5, 0, 1), expand_batch_to_tokens(values, ends, 5, 0, 1)):
            return False
    return True


def repair_sampling() -> None:
    """Replace vLLM's function for the CPU if it is faulty, and log that."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu() and not is_sound(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        logger.warning(
            "this vLLM verifies sampled candidates with unset temperatures on a CPU; its function "
            "expand_batch_to_tokens is replaced"
        )
