"""Features: hidden states that a model's passes keep for the components that asked for them.

The model gets all wishes at once. Without any, a pass keeps no states and does no extra work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Floats
from card.models.images import PlacedImages
from card.models.protocol import Extension
from card.models.rows.row_tree import IntArray

Rows = Literal["all", "logits", "last"]

FINAL = -1  # the state after the final norm, in transformers' ``hidden_states``
RAW = 1 << 16  # the same state before that norm, which they lack; of models in our own pass only


@dataclass(frozen=True, slots=True)
class FeatureWish:
    """The hidden states that a consumer wants.

    ``layers`` count as transformers' ``hidden_states`` do: 0 is the embedding, 1 follows the first layer, and the last
    one (-1) is taken after the final norm, `RAW` before it. Those of an inflated model are its original's.
    """

    layers: tuple[int, ...]
    rows: Rows = "all"  # those of a text, those of them with logits, or the last committed one


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Rows that a pass added to a text, as one consumer wished to see them."""

    request_id: int
    token_ids: Sequence[int]  # the text so far, newest token included; do not change it
    first: int  # place of the first row in the text; rows copied from another text are not seen, those run anew are
    features: Floats  # [rows, layers * D]
    has_drafter: bool  # a draft model proposes candidates for this text
    hidden: PlacedImages | None = None  # what a drafter is not sent of it


class FeatureConsumer(Protocol):
    """Looks at hidden states of the target after each pass. It cannot change a text."""

    @property
    def wish(self) -> FeatureWish:
        """The states that it wants to see, always the same."""

    def observe(self, seen: SeenRows) -> float | None:
        """Take the rows that a pass added to a text.

        Returns: the probability below which growth branch takes alternatives from now on; None: as before.
        """


class PassStates:
    """States that one pass keeps for all wishes together."""

    def __init__(self, layers: Set[int], rows: IntArray | slice) -> None:
        self.layers = layers  # that are wanted: 0, 1, ..., `FINAL` or `RAW`
        self.rows = rows  # of the pass that are wanted
        self.kept: dict[int, Floats] = {}  # [rows, D or more], by layer

    def take(self, layer: int, hidden: Floats) -> None:
        """Keep what is wanted of the states after a layer, [sum T, D or more]; the array is not written to again."""
        if layer in self.layers:
            self.kept[layer] = hidden[self.rows]

    def take_final(self, hidden: Floats, norm: Callable[[Floats], Floats]) -> None:
        """Keep what is wanted of the states after the last layer, with the final norm or without it."""
        if FINAL in self.layers:
            chosen = hidden[self.rows]
            self.kept[FINAL] = norm(chosen) if len(chosen) else chosen
        if RAW in self.layers:
            self.kept[RAW] = np.array(hidden[self.rows])  # the next pass overwrites them


class Features:
    """The wishes told to one model, joined, and what its last pass has kept for them."""

    def __init__(self, num_layers: int, width: int, *, has_raw: bool = False) -> None:
        """Begin without wishes; the sizes are those of the original of an inflated model.

        Args:
            has_raw: its passes keep the `RAW` state too.
        """
        self.layers: Set[int] = frozenset()  # that passes are to keep, as `PassStates` has them
        self._num_layers, self._width, self._has_raw = num_layers, width, has_raw
        self._wishes: dict[FeatureWish, tuple[int, ...]] = {}  # with their layers in the same form
        self._keeps_all_rows = False
        self._states: PassStates | None = None
        self._extensions: Sequence[Extension] = ()
        self.num_again: Sequence[int] = ()  # of each extension: rows at its beginning that an earlier pass left too

    def wish(self, wishes: Sequence[FeatureWish]) -> None:
        """Let every pass from now on keep what these wishes need, and nothing else.

        Raises: ModelError if the model lacks a layer; nothing has changed then.
        """
        self._wishes = {wish: tuple([self._resolved(layer) for layer in wish.layers]) for wish in wishes}
        self.layers = {layer for layers in self._wishes.values() for layer in layers}
        self._keeps_all_rows = any(wish.rows == "all" for wish in wishes)
        self.leave(None)

    def _resolved(self, layer: int) -> int:
        most = self._num_layers
        if layer == RAW and not self._has_raw:
            raise ModelError("this model gives no state before its final norm; run it on a CPU in our own pass")
        if layer == RAW:
            return RAW
        if not -most - 1 <= layer <= most:
            raise ModelError(
                f"the hidden states of this model are 0 to {most}, or -1 to {-most - 1} from the last one, got {layer};"
                " ask for others"
            )
        return FINAL if layer in (most, -1) else layer % (most + 1)

    def begin(self, logits_rows: IntArray | slice) -> PassStates | None:
        """Return what the next pass is to fill; None if there are no wishes."""
        if not self.layers:
            return None
        return PassStates(self.layers, slice(None) if self._keeps_all_rows else logits_rows)

    def leave(self, states: PassStates | None, extensions: Sequence[Extension] = ()) -> None:
        """Hold what a pass over these extensions has kept, until the next one."""
        self._states, self._extensions, self.num_again = states, extensions if states else (), ()

    def of(self, extension_idx: int, wish: FeatureWish) -> Floats:
        """Return what the last pass left for a wish: [rows, layers * D] float32.

        The rows are those of the extension for a wish of all rows, else those with logits: which of them will be
        committed last is not known to a model. Raises: ModelError if the pass kept nothing for such a wish.
        """
        num_left = len(self._extensions)
        if self._states is None or wish not in self._wishes or not 0 <= extension_idx < num_left:
            raise ModelError(
                f"the last pass kept features of {num_left} sequences for {len(self._wishes)} wishes, not those of"
                f" sequence {extension_idx} for {wish}; ask for them before the pass"
            )
        unkept = [0 if self._keeps_all_rows else one.first_logits_idx for one in self._extensions]
        ends = list(accumulate(len(one.token_ids) - n for one, n in zip(self._extensions, unkept, strict=True)))
        start, one = (0, *ends)[extension_idx], self._extensions[extension_idx]
        if wish.rows != "all":
            start += one.first_logits_idx - unkept[extension_idx]
        elif self.num_again:
            start += self.num_again[extension_idx]
        rows = slice(start, ends[extension_idx])
        states = [self._states.kept[layer][rows, : self._width] for layer in self._wishes[wish]]
        return states[0] if len(states) == 1 else np.concatenate(states, -1)
