"""Filters of logits in recorded steps: their operations must not depend on values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from card.config import SamplingRule

_NEGATIVE_INFINITY = float("-inf")


def filter_on_device(logits: Tensor, rule: SamplingRule) -> Tensor:
    """As `card.tree.filters.filter_logits`; logits are [N, V] float32 or float64."""
    scaled = logits / rule.temperature if rule.temperature != 1.0 else logits
    if 0 < rule.top_k < scaled.shape[-1]:
        kth = scaled.topk(rule.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, _NEGATIVE_INFINITY)
    if rule.top_p < 1.0:
        scaled = _keep_likely(scaled, rule.top_p)
    if rule.min_p > 0.0:
        floor = scaled.max(-1, keepdim=True).values + float(np.log(rule.min_p))
        scaled = scaled.masked_fill(scaled < floor, _NEGATIVE_INFINITY)
    return scaled


def _keep_likely(scaled: Tensor, top_p: float) -> Tensor:
    """Exclude the tokens after likelier ones of mass ``top_p``."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    beyond = (probs.cumsum(-1) - probs) >= top_p  # the mass before a token already suffices
    beyond[..., 0] = False  # float32 may round top_p to 0
    return scaled.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), _NEGATIVE_INFINITY)
