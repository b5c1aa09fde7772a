"""Scales of queries that grow with the position, in layers without a rotary embedding (Llama 4; arXiv:2501.19399).

transformers counts positions from the first row of a pass. Our passes have rows of several texts, so our attention
applies the scales while it is installed in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SWITCH = "attn_temperature_tuning"  # of a layer that scales its queries, and in its config


class QueryScales:
    """The layers of a model that scale their queries by position."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules: list[Any] = [module for module in model.modules() if hasattr(module, _SWITCH)]
        self._layers = {
            int(module.layer_idx): module
            for module in modules
            if getattr(module.config, _SWITCH) and not module.use_rope
        }

    def leave_to_model(self, is_left: bool) -> None:
        """Switch the layers' own scaling of queries on or off."""
        for module in self._layers.values():
            setattr(module, _SWITCH, is_left)

    def of(self, positions: Tensor) -> Mapping[int, Tensor]:
        """Return the scales [T] float32 of each such layer's queries at ``positions`` [T]."""
        ends = positions.float() + 1.0
        return {
            layer: torch.log1p(torch.floor(ends / module.floor_scale)) * module.attn_scale + 1.0
            for layer, module in self._layers.items()
        }
