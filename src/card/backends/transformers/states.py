"""States of recurrent and convolutional layers: a state summarises all rows up to one, and cannot be rolled back.

States are kept at few places of a sequence. Rows after the newest place are run again, with the rows that follow.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from card.models.files.sources import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Argument for transformers' cache: of all models since 5.24; before, of Mamba-like models, and of the others.
CACHE_NAMES = ("cache", "cache_params", "past_key_values")
MAX_RECENT = 4  # states of the last passes, whose rows may still be dropped
MAX_LANDMARKS = 3  # states at the ends of parts of a prompt, for texts with the same beginning
MIN_READ_TOKENS = 8  # fewest tokens of a pass that counts as part of a prompt, at whose end a landmark is kept
STATES_PER_SEQUENCE = MAX_RECENT + MAX_LANDMARKS + 1  # and the present one


@dataclass(frozen=True, slots=True)
class State:
    """The states of all layers after the first ``num_rows`` rows; read-only."""

    num_rows: int
    layers: Mapping[int, Any]  # by number: transformers' cache layers


class Tail:
    """The tokens of one sequence, and its kept states."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._recent: list[State] = []  # ascending
        self._landmarks: list[State] = []  # ascending

    def state_at(self, num_rows: int) -> State | None:
        """Return the newest state of at most ``num_rows`` rows; None if only the empty one is left."""
        fitting = [state for state in (*self._landmarks, *self._recent) if state.num_rows <= num_rows]
        return max(fitting, key=lambda state: state.num_rows, default=None)

    @property
    def num_absorbed(self) -> int:
        """Number of rows in the newest state; the other rows are run again."""
        return num_absorbed(self.state_at(len(self.token_ids)))

    def add(self, token_ids: Sequence[int], states: Sequence[State], landmark: int | None) -> None:
        """Append the rows of a pass.

        Args:
            states: kept by the pass, ascending.
            landmark: rows of the state among them with which other texts may begin; None: there is none.
        """
        self.token_ids += token_ids
        for state in states:
            (self._landmarks if state.num_rows == landmark else self._recent).append(state)
        _thin(self._landmarks, MAX_LANDMARKS)
        _thin(self._recent, MAX_RECENT)

    def cut(self, num_rows: int) -> None:
        """Drop all rows from ``num_rows`` on, and the states that include them."""
        del self.token_ids[num_rows:]
        self._recent = [state for state in self._recent if state.num_rows <= num_rows]
        self._landmarks = [state for state in self._landmarks if state.num_rows <= num_rows]

    def copied(self, num_rows: int) -> Tail:
        """Return the first rows; they share the states, which are read-only."""
        copied = copy.copy(self)
        copied.token_ids = list(self.token_ids)
        copied.cut(num_rows)
        return copied


def num_absorbed(state: State | None) -> int:
    """Return the number of rows in a state."""
    return 0 if state is None else state.num_rows


def cache_name(forward: Callable[..., Any]) -> str | None:
    """Return the name of the argument of a module's ``forward`` for transformers' cache; None if it has none."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def cloned(layer: Any) -> Any:
    """Return a cache layer of transformers with copied tensors."""
    clone = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(clone, name, {key: one.clone() if isinstance(one, Tensor) else one for key, one in value.items()})
    return clone


def num_bytes(layer: Any) -> int:
    """Return the memory of a cache layer's states."""
    held = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return sum(one.nbytes for one in held if isinstance(one, Tensor))


def least_state_bytes(model: PreTrainedModel) -> int:
    """Return the least memory of a sequence's states; the model may be on the device "meta", without weights.

    Raises: errors of any type, for models that keep their state elsewhere.
    """
    cache: Any = transformers.DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=True, **{str(cache_name(model.forward)): cache})
    return STATES_PER_SEQUENCE * sum(num_bytes(layer) for layer in cache.layers if hasattr(layer, "conv_states"))


def state_bytes_by_config(config: Any) -> int:
    """Return the least memory of a sequence's states from a model's config; 0 if it cannot be built."""
    loader: Any = transformers.AutoModelForCausalLM
    try:
        with quiet(), torch.device("meta"), torch.inference_mode():
            return least_state_bytes(loader.from_config(copy.deepcopy(config.get_text_config()), dtype=torch.bfloat16))
    except Exception:  # loading reports it
        return 0


def _thin(states: list[State], most: int) -> None:
    """Drop states until ``most`` are left: distances grow with the distance from the newest.

    The newest two are kept, as the rows of the last pass may still be dropped.
    """
    while len(states) > most:
        rows = [0, *(state.num_rows for state in states)]
        gaps = [(rows[i + 2] - rows[i]) / (rows[-1] - rows[i + 1]) for i in range(len(states) - 2)]
        del states[gaps.index(min(gaps))]
