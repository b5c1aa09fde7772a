"""`HybridRunner`: transformers' models with a recurrent or convolutional state, behind the `LanguageModel` protocol.

The state after the newest absorbed row is kept. A pass runs the rows that are not absorbed together with the new ones;
the state after each of its parts is kept besides the old one. So a dropped row has never changed a kept state, and no
row needs an extra pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from card.backends.transformers.attention import SequencePass
from card.backends.transformers.generic import GenericDecoder, require_causal
from card.backends.transformers.mixers import Mixer, find_mixers
from card.backends.transformers.replaced_attention import own_attention
from card.backends.transformers.runner import TorchRunner
from card.backends.transformers.states import MIN_READ_TOKENS, STATES_PER_SEQUENCE, State, Tail, cloned, num_absorbed
from card.errors import ModelError
from card.models.features import PassStates
from card.models.images import ImageRows
from card.models.protocol import Extension
from card.models.rows.row_tree import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HybridRunner(TorchRunner):
    """Runs a model with a state that cannot be rolled back. The rows of a sequence are a chain.

    Layers with a state run the sequences of a pass one after the other; all other layers run all rows at once.
    """

    _decoder: HybridDecoder

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        """Make a runner of ``model``; arguments and errors as of `TorchRunner`."""
        super().__init__(model, **settings)
        self._tails: dict[int, Tail] = {}  # by slot; the KV cache holds the absorbed rows

    @property
    def state_bytes(self) -> int:
        """Most memory of a sequence besides its rows."""
        return STATES_PER_SEQUENCE * self._decoder.state_bytes

    @property
    def runs_row_by_row(self) -> bool:
        """True if layers with a state run several tokens one by one, as their scan would lose the state."""
        return self._decoder.runs_row_by_row

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence; arguments and errors as of `TorchRunner`."""
        slot = super().open(max_rows)
        self._tails[slot] = Tail()
        return slot

    def close(self, slot: int) -> None:
        """Drop a sequence with its states. Raises: ModelError if the slot is not open."""
        super().close(slot)
        del self._tails[slot]

    def num_rows(self, slot: int) -> int:
        """Return how many rows the sequence holds, absorbed or not. Raises: ModelError if the slot is not open."""
        return len(self._tail(slot).token_ids)

    def lendable_rows(self, slot: int, num_rows: int) -> int:
        """Return how many of the first ``num_rows`` rows can be copied without running them again."""
        return num_absorbed(self._tail(slot).state_at(num_rows))

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Copy the first rows of ``source`` into the empty sequence ``slot``. Raises: see `KVCache.copy_rows`."""
        origin = self._tail(source)
        if self.num_rows(slot):
            raise ModelError(f"slot {slot} holds {self.num_rows(slot)} rows; rows are copied into an empty one only")
        if not 0 <= num_rows <= len(origin.token_ids):
            raise ModelError(f"{num_rows} rows of slot {source} were to be copied; it has {len(origin.token_ids)}")
        super().copy_rows(source, slot, self.lendable_rows(source, num_rows))
        self._tails[slot] = origin.copied(num_rows)

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep the first rows and ``rows``, which must continue them. Raises: ModelError if they are no such chain."""
        tail, num_kept = self._tail(slot), num_prefix_rows + len(rows)
        if list(rows) != list(range(num_prefix_rows, num_kept)) or not 0 <= num_kept <= len(tail.token_ids):
            raise ModelError(
                f"asked to keep the first {num_prefix_rows} rows of {len(tail.token_ids)} and then {list(rows)};"
                " a model with a recurrent state keeps a chain from the first row on"
            )
        tail.cut(num_kept)
        super().keep(slot, tail.num_absorbed)

    def forward(self, extensions: Sequence[Extension]) -> list[Any]:
        """Run the new tokens of several sequences and append their rows; arguments and errors as of `TorchRunner`.

        Raises: ModelError also for tokens that are no chain, and for chosen rows or scores, as states have no rows.
        """
        if any(one.reads is not None or one.scores is not None for one in extensions):
            raise ModelError("a model with a recurrent state reads no chosen rows and keeps no attention scores")
        parts = []
        offset = 0
        for extension in extensions:
            parts.append(self._part(extension, offset))
            offset = parts[-1].cuts[-1]
        num_again = [
            len(part.extension.token_ids) - len(one.token_ids) for part, one in zip(parts, extensions, strict=True)
        ]
        self._decoder.parts = parts
        try:
            logits = super().forward([part.extension for part in parts])
            self.features.num_again = num_again
            for extension, part in zip(extensions, parts, strict=True):
                self._tails[extension.slot].add(extension.token_ids, part.states(), part.landmark)
        finally:
            self._decoder.parts = ()  # with their states
        return logits

    def _part(self, extension: Extension, offset: int) -> _Part:
        """Return a sequence's part of a pass: the rows that are not absorbed, and the new ones."""
        tail = self._tail(extension.slot)
        num_rows, num_new, num_read = len(tail.token_ids), len(extension.token_ids), extension.first_logits_idx
        if not num_new or list(extension.parents) != list(range(num_rows - 1, num_rows - 1 + num_new)):
            raise ModelError(
                f"slot {extension.slot}: {num_new} tokens with parents {list(extension.parents)} are no chain behind"
                f" {num_rows} rows; a model with a recurrent state runs chains only"
            )
        state = tail.state_at(num_rows)
        start = num_absorbed(state)
        num_again = num_rows - start
        token_ids = [*tail.token_ids[start:], *extension.token_ids]
        parents = range(start - 1, start - 1 + len(token_ids))
        whole = Extension(extension.slot, token_ids, parents, num_again + num_read)
        # The state is kept after the last row that is no candidate, so that no row is run a third time.
        is_prompt = num_read >= MIN_READ_TOKENS
        cut = num_again + num_read if is_prompt else num_again + num_read + 1 if num_again else 0
        cuts = [offset, *([offset + cut] if 0 < cut < len(token_ids) else []), offset + len(token_ids)]
        return _Part(whole, start, cuts, state, start + cut if is_prompt else None)

    def _tail(self, slot: int) -> Tail:
        """Return the tail of a sequence. Raises: ModelError if the slot is not open."""
        self._cache[slot]
        return self._tails[slot]

    def _require_runnable(self, model: PreTrainedModel) -> None:
        require_causal(model)

    def _make_decoder(self, model: PreTrainedModel, max_model_len: int) -> Any:
        return HybridDecoder(model, max_model_len)


@dataclass(slots=True)
class _Part:
    """The part of one sequence in a pass."""

    extension: Extension  # with the rows that are run again
    start: int  # rows that ``state`` has absorbed
    cuts: list[int]  # rows of the pass: 0, and the numbers of rows after which the state is kept
    state: State | None  # None: that of an empty sequence
    landmark: int | None  # rows of the sequence after which a state is worth keeping for other texts
    cache: Any = None  # transformers' cache, written by the layers
    kept: list[dict[int, Any]] = field(default_factory=list)  # by cut without the first, then by layer

    def begin(self, cache: Any) -> None:
        """Fill an empty cache of transformers with the state."""
        for layer, held in self.state.layers.items() if self.state is not None else ():
            cache.layers[layer] = cloned(held)
        self.cache, self.kept = cache, [{} for _ in self.cuts[1:]]

    def states(self) -> list[State]:
        """Return the states that the pass has kept."""
        first = self.cuts[0]
        return [State(self.start + cut - first, layers) for cut, layers in zip(self.cuts[1:], self.kept, strict=True)]


class HybridDecoder(GenericDecoder):
    """A `GenericDecoder` whose layers with a state run the part of each sequence from its own state."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.parts: Sequence[_Part] = ()  # of the next pass
        with own_attention(model):
            self._mixers, self.state_bytes = find_mixers(model)
        self.runs_row_by_row = not all(mixer.goes_on for mixer in self._mixers)
        super().__init__(model, max_model_len)

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        steps: Sequence[SequencePass],
        logits_rows: IntArray | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Run a pass over ``parts``; arguments and result as of `GenericDecoder`."""
        for part in self.parts:
            part.begin(transformers.DynamicCache(config=self.model.config))
        with self._mixing():
            return super().forward(token_ids, positions, steps, logits_rows, states, images)

    @contextlib.contextmanager
    def _mixing(self) -> Iterator[None]:
        """Inside the block the mixers run part by part."""
        before = [vars(mixer.module).get("forward") for mixer in self._mixers]
        for mixer in self._mixers:
            mixer.module.forward = partial(self._mix, mixer, mixer.module.forward)
        try:
            yield
        finally:
            for mixer, forward in zip(self._mixers, before, strict=True):
                del mixer.module.forward
                if forward is not None:
                    mixer.module.forward = forward

    def _mix(self, mixer: Mixer, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        call = mixer.signature.bind(*args, **kwargs)
        mixed = []
        for part in self.parts:
            for cut, (first, last) in enumerate(pairwise(part.cuts)):
                mixed += mixer.run(forward, call, part.cache, first, last)
                is_last = cut == len(part.kept) - 1
                held = part.cache.layers[mixer.layer]
                part.kept[cut][mixer.layer] = held if is_last else cloned(held)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)
