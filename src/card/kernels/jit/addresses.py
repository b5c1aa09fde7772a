"""Where the parts of a pass lie, by its tables."""

from __future__ import annotations

from card.kernels.jit.tables import ConvTable, LayerTable, PassTable, RowTable
from card.kernels.jit.vectors import GROUP, compiled


@compiled
def layer_entry(table: PassTable, layer: int) -> LayerTable:
    """Return a layer's table."""
    return LayerTable(table.layers + 8 * LayerTable.size * layer)


@compiled
def row_entry(table: PassTable, row: int) -> RowTable:
    """Return a row's table."""
    return RowTable(table.rows + 8 * RowTable.size * row)


@compiled
def input_entry(table: PassTable, row: int) -> ConvTable:
    """Return the table of what convolutions of a row take in."""
    return ConvTable(table.conv_tables + 8 * table.conv_size * row)


@compiled
def sources_of(table: PassTable, row: int) -> int:
    """Return where a row's table names the records of its ancestors."""
    return input_entry(table, row) + 8 * ConvTable.size


@compiled
def all_heads(of: LayerTable) -> int:
    """Return how many heads a layer has of a row, by its table: queries, keys, values and those behind them."""
    return of.heads + 2 * of.kv_heads + of.more_heads + of.spare_heads


@compiled
def attended_bytes(of: LayerTable) -> int:
    """Return the bytes of a row of what attention gives in a layer: whole groups of floats."""
    return (4 * of.out_heads * of.padded_head + 4 * GROUP - 1) // (4 * GROUP) * (4 * GROUP)


@compiled
def kept_bytes(table: PassTable, of: LayerTable) -> int:
    """Return the bytes of one head of a row in the cache, in a layer whose table is ``of``."""
    return of.padded_head * table.kv_bytes


@compiled
def kept_at(table: PassTable, of: LayerTable, its: RowTable, head: int) -> int:
    """Return where a sequence's rows of a head lie in the cache; the keys of a layer first, then the values.

    The layers lie one after the other, each [2, KV heads, room, channels].

    Args:
        of, its: the tables of the layer, and of a row.
    """
    return its.kv + its.max_rows * (of.kv_at + head * kept_bytes(table, of))
