"""Addresses of the parts of a pass, by its tables."""

from __future__ import annotations

from card.kernels.jit.tables import CACHE_ROWS, ConvTable, LayerTable, PassTable, RowTable
from card.kernels.jit.vectors import GROUP, compiled, load_int


@compiled
def layer_entry(table: PassTable, layer_idx: int) -> LayerTable:
    """Return a layer's table."""
    return LayerTable(table.layers + 8 * LayerTable.size * layer_idx)


@compiled
def row_entry(table: PassTable, row: int) -> RowTable:
    """Return a row's table."""
    return RowTable(table.rows + 8 * RowTable.size * row)


@compiled
def conv_entry(table: PassTable, row: int) -> ConvTable:
    """Return the table of what convolutions of a row take in."""
    return ConvTable(table.conv_tables + 8 * table.conv_size * row)


@compiled
def sources_of(table: PassTable, row: int) -> int:
    """Return where a row's table names the records of its ancestors."""
    return conv_entry(table, row) + 8 * ConvTable.size


@compiled
def all_heads(layer: LayerTable) -> int:
    """Return how many heads a layer has of a row, by its table: queries, keys, values and those behind them."""
    return layer.heads + 2 * layer.kv_heads + layer.more_heads + layer.spare_heads


@compiled
def attended_bytes(layer: LayerTable) -> int:
    """Return the bytes of a row of what attention gives in a layer: whole groups of floats."""
    return (4 * layer.out_heads * layer.padded_head + 4 * GROUP - 1) // (4 * GROUP) * (4 * GROUP)


@compiled
def cached_bytes(table: PassTable, layer: LayerTable) -> int:
    """Return the bytes of one head of a row in the cache."""
    return layer.padded_head * table.kv_bytes


@compiled
def cached_at(table: PassTable, layer: LayerTable, head: int) -> int:
    """Return how many bytes of a block of the cache lie before the rows of a head, the keys of a layer first.

    The layers lie one after the other, each [2, KV heads, CACHE_ROWS, channels].
    """
    return CACHE_ROWS * (layer.kv_at + head * cached_bytes(table, layer))


@compiled
def cached_row(row: RowTable, cached: int, slot: int, row_bytes: int) -> int:
    """Return where row ``slot`` of a sequence lies, of the head at ``cached``; up to CACHE_ROWS lie side by side."""
    return load_int(row.blocks + 8 * (slot // CACHE_ROWS)) + cached + slot % CACHE_ROWS * row_bytes
