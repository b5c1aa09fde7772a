"""Layout of KV rows in memory: keys and values of all layers.

The arrays are NumPy's, or those of a layout that makes others of the same behaviour (`card.backends.transformers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, ClassVar, NamedTuple

from card.errors import ModelError
from card.kernels.jit.tables import CACHE_ROWS
from card.kernels.number_types import paged_zeros


class KVShape(NamedTuple):
    """A layer's part of a row: a key and a value of each head."""

    num_kv_heads: int
    head_size: int

    @property
    def num_elements(self) -> int:
        """Numbers of keys and values."""
        return 2 * self.num_kv_heads * self.head_size


_NO_LAYER = KVShape(1, 1)  # the shape of no layers at all


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of the cache: runs of layers of one shape, each an array [L, 2, Hkv, capacity, D], one after the other."""

    layers: tuple[KVShape, ...]  # that keep keys and values
    dtype: Any  # NumPy's, or that of another layout's arrays
    device: Any = "cpu"
    block_rows: ClassVar[int | None] = CACHE_ROWS
    """Rows of a block, which sequences share; None: all rows of a sequence are one block of its own."""

    @property
    def row_elements(self) -> int:
        """Numbers in one row: keys and values of all layers and heads."""
        return sum(layer.num_elements for layer in self.layers)

    @property
    def places(self) -> list[int]:
        """Numbers of a row that lie before those of each layer."""
        return list(accumulate((layer.num_elements for layer in self.layers), initial=0))[:-1]

    @property
    def shape(self) -> KVShape:
        """The shape of all layers. Raises: ModelError if they have none in common."""
        if len(set(self.layers)) > 1:
            raise ModelError(
                f"the layers keep keys of {len(set(self.layers))} shapes, and rows are chosen where all have one;"
                " use a method that reads all rows"
            )
        return self.layers[0] if self.layers else _NO_LAYER

    def runs(self, buffer: Any, capacity: int) -> list[Any]:
        """Return the arrays of ``capacity`` rows at the start of a buffer."""
        arrays, first = list[Any](), 0
        for shape, layers in groupby(self.layers):
            num_layers = len(list(layers))
            end = first + num_layers * capacity * shape.num_elements
            arrays.append(buffer[first:end].reshape(num_layers, 2, shape.num_kv_heads, capacity, shape.head_size))
            first = end
        return arrays or [buffer[:0].reshape(0, 2, _NO_LAYER.num_kv_heads, capacity, _NO_LAYER.head_size)]

    def make(self, num_elements: int) -> Any:
        """Return an array of so many numbers, whatever they are. Raises: MemoryError, RuntimeError without room."""
        return paged_zeros(num_elements, self.dtype)
