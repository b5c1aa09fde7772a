"""Rotary embeddings with other frequencies for long texts (longrope of Phi-3 and similar), chosen for each row.

transformers chooses the frequencies for a whole pass, by its longest position. Here each row's own text decides. A text
of at most `switch_len` tokens has the short frequencies; a longer one has the long frequencies for all its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from card.errors import ModelError, named
from card.models.long_texts import LONG_ROPE
from card.models.names import model_name
from card.models.rows.row_tree import BoolArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LongRope:
    """Lets the rotary modules of a model rotate each row by its own text's frequencies."""

    def __init__(self, model: PreTrainedModel, switch_len: int) -> None:
        """Find the modules. Raises: ModelError if there are none."""
        self._switch_len = switch_len
        self._modules = [module for module in model.modules() if _is_long_rope(getattr(module, "rope_type", None))]
        if not self._modules:
            raise ModelError(
                f"the rotary factors of {model_name(model)} for long texts cannot be chosen for each text; set"
                f" {named('max_model_len')} to {switch_len} or less"
            )

    @contextlib.contextmanager
    def choosing(self, is_long: BoolArray) -> Iterator[None]:
        """Inside the block ``is_long`` [sum T] chooses the frequencies of a pass's rows instead of the model's rule."""
        if not is_long.any():  # no position is beyond the short context, so its own rule is the same
            yield
            return
        before = [vars(module).get("forward") for module in self._modules]
        for module in self._modules:
            module.forward = partial(self._rotate, module.forward, is_long)
        try:
            yield
        finally:
            for module, forward in zip(self._modules, before, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _rotate(
        self, rotate: Any, is_long: BoolArray, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Return cos and sin [..., T, D] of positions [..., T]; ``rotate`` chooses by the longest of a call."""
        beyond = torch.full_like(position_ids[..., :1], self._switch_len)
        tables = rotate(x, torch.cat((position_ids, beyond), -1), *args, **kwargs)
        long = tuple(one[..., :-1, :] for one in tables)
        if is_long.all():
            return long
        chosen = torch.from_numpy(is_long).to(position_ids.device)
        short = rotate(x, position_ids.masked_fill(chosen, 0), *args, **kwargs)
        return tuple(torch.where(chosen[:, None], *pair) for pair in zip(long, short, strict=True))


def _is_long_rope(rope_type: object) -> bool:
    """Return whether a rotary module's type, or that of one of its kinds of layers, is the one with two factors."""
    return LONG_ROPE in (rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,))
