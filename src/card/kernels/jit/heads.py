"""Heads of queries, keys and values before attention: their norms, their turn, and their rows in the cache."""

from __future__ import annotations

from card.kernels.jit.addresses import all_heads, cached_at, cached_bytes, cached_row, layer_entry, row_entry
from card.kernels.jit.rows import MINUS_ONE, rms_norm
from card.kernels.jit.tables import LayerTable, PassTable
from card.kernels.jit.vectors import (
    LANES,
    compiled,
    fill,
    fma,
    load,
    load_float,
    store,
    store_float,
    store_halves,
    times,
)


@compiled
def turn(x: int, cos: int, sin: int, size: int) -> None:
    """Turn a head by its position, in place."""
    half = 4 * (size // 2)
    whole = half // (4 * LANES) * (4 * LANES)
    for at in range(0, whole, 4 * LANES):
        low, high = load(x + at), load(x + half + at)
        store(x + at, fma(low, load(cos + at), times(times(high, load(sin + at)), fill(MINUS_ONE))))
        store(x + half + at, fma(high, load(cos + half + at), times(low, load(sin + half + at))))
    for at in range(whole, half, 4):
        a, b = load_float(x + at), load_float(x + half + at)
        store_float(x + at, a * load_float(cos + at) - b * load_float(sin + at))
        store_float(x + half + at, b * load_float(cos + half + at) + a * load_float(sin + half + at))


@compiled
def grow(x: int, factor: float, padded: int) -> None:
    """Multiply a head by a factor, in place."""
    for at in range(x, x + 4 * padded, 4 * LANES):
        store(at, times(load(at), fill(factor)))


@compiled
def norm_all_heads(table: PassTable, layer_idx: int, row: int) -> None:
    """Apply the norms of a row's queries and keys, each over all heads at once."""
    layer = layer_entry(table, layer_idx)
    heads, kv_heads = layer.heads, layer.kv_heads
    size, padded, eps = layer.head_size, layer.padded_head, table.eps
    query = table.projected + 4 * padded * all_heads(layer) * row
    key = query + 4 * padded * heads
    rms_norm(query, layer.query_norm, query, size * heads, padded * heads, eps)
    rms_norm(key, layer.key_norm, key, size * kv_heads, padded * kv_heads, eps)


@compiled
def prepare_heads(table: PassTable, layer_idx: int, first_row: int, last_row: int, first: int, last: int) -> None:
    """Norm and turn heads ``first`` to ``last`` (queries, keys, values) of some rows; keep keys and values."""
    layer = layer_entry(table, layer_idx)
    heads, kv_heads = layer.heads, layer.kv_heads
    size, padded, eps = layer.head_size, layer.padded_head, table.eps
    has_head_norms, turned = not table.has_wide_norms, layer.turned
    value_norm, growth, turns_first = layer.value_norm, layer.query_growth, layer.turns_first
    for row in range(first_row, last_row):
        row_table = row_entry(table, row)
        angle = 4 * turned * row_table.angle
        for head in range(first, last):
            x = table.projected + 4 * padded * (row * all_heads(layer) + head)
            if head < heads + kv_heads:
                norm = layer[LayerTable.query_norm if head < heads else LayerTable.key_norm]
                if turned and turns_first:
                    turn(x, layer.cos + angle, layer.sin + angle, turned)
                if norm and has_head_norms:
                    rms_norm(x, norm, x, size, padded, eps)
                if turned and not turns_first:
                    turn(x, layer.cos + angle, layer.sin + angle, turned)
                if growth and head < heads:
                    grow(x, load_float(growth + 4 * row_table.position), padded)
            elif value_norm:
                rms_norm(x, value_norm, x, size, padded, eps)
            if head >= heads:
                kept_at = cached_at(table, layer, head - heads)
                out = cached_row(row_table, kept_at, row_table.slot, cached_bytes(table, layer))
                for at in range(0, padded, LANES):
                    if table.kv_bytes == 4:
                        store(out + 4 * at, load(x + 4 * at))
                    else:
                        store_halves(out + 2 * at, load(x + 4 * at))
