"""Attention modules that several layers share (Zamba, Zamba2; arXiv:2405.16712): each call names its layer.

Other modules store the number of their layer. A shared module gets it before each call while our attention is
installed.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel


class SharedAttention:
    """The attention modules of a model whose calls name a layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: list[Any] = [module for module in model.modules() if _is_shared(module)]
        self._handles: list[RemovableHandle] = []

    def take_over(self) -> None:
        """Set in each module the number of the calling layer."""
        self._handles = [module.register_forward_pre_hook(_number, with_kwargs=True) for module in self._modules]

    def release(self) -> None:
        """Restore the modules."""
        for handle in self._handles:
            handle.remove()


def _is_shared(module: nn.Module) -> bool:
    return getattr(module, "is_causal", False) and "layer_idx" in inspect.signature(module.forward).parameters


def _number(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module.layer_idx = inspect.signature(module.forward).bind(*args, **kwargs).arguments["layer_idx"]
