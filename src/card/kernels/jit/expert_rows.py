"""A thread's memory of its rows for a layer with experts: each row's choices, the rows of each expert, and tiles.

A row is kept as a record, laid out as a tile of one row. For an expert, its rows' records are copied into one tile.
"""

from __future__ import annotations

from card.kernels.jit import tables as t
from card.kernels.jit.rows import floats_behind, scales_behind, sums_behind, tile_size
from card.kernels.jit.tables import ExpertEntry, ExpertTable, PassTable
from card.kernels.jit.tiles import MOST_ROWS, PANEL
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    PARTS,
    SUMS_BYTES,
    compiled,
    copy_group,
    load,
    load_float,
    load_int,
    store,
    store_float,
)

TOGETHER = 4 * MOST_ROWS  # most rows of an expert in a tile, for which its weights are read from memory once
DOWN_PANELS = 16  # output panels of few rows that are computed before they are added
_RECORD = GROUP + 4 + SUMS_BYTES + 4 * GROUP  # bytes of a record's group: 8-bit numbers, scale, sums, floats
CHOICE_BYTES = 16  # an expert's number, and its weight
SLOT_BYTES = 24  # the address of a row's record, the row's number, and its weight
_LINE = 64


def room_for_experts(num_rows: int, num_listed: int, num_taken: int, width: int) -> int:
    """Return the bytes that a thread needs besides its records.

    Args:
        num_listed, num_taken: experts of a layer, and of a row, shared ones among them.
        width: of the hidden states, with their padding.
    """
    of_rows = (CHOICE_BYTES + SLOT_BYTES) * num_rows * num_taken + 8 * (num_listed + 2)
    choosing = CHOICE_BYTES * (num_taken + LANES) + 4 * (num_listed + LANES)
    rooms = max(8 * GROUP * MOST_ROWS, 4 * PANEL * DOWN_PANELS * MOST_ROWS, choosing)
    return of_rows + _LINE + _RECORD * (width // GROUP) * TOGETHER + rooms + SLOT_BYTES * TOGETHER


@compiled
def num_taken(experts: ExpertTable) -> int:
    """Return how many experts a row takes, the shared one among them."""
    return experts.num_chosen + int(experts.shared != t.NO_SHARED)


@compiled
def num_listed(experts: ExpertTable) -> int:
    """Return how many experts there are, the shared one among them."""
    return experts.num_experts + int(experts.shared != t.NO_SHARED)


@compiled
def expert_entry(experts: ExpertTable, expert: int) -> ExpertEntry:
    """Return the entry of an expert."""
    return ExpertEntry(experts + 8 * (ExpertTable.size + ExpertEntry.size * expert))


@compiled
def record_bytes(table: PassTable) -> int:
    """Return the bytes of a row's record."""
    return _RECORD * (table.padded_width // GROUP)


@compiled
def choices_at(table: PassTable, experts: ExpertTable, scratch: int, row: int) -> int:
    """Return where a thread keeps what one of its rows takes."""
    return scratch + table.experts_at + CHOICE_BYTES * num_taken(experts) * row


@compiled
def starts_at(table: PassTable, experts: ExpertTable, scratch: int) -> int:
    """Return where a thread keeps, for each expert, which of the sorted rows is its first."""
    return choices_at(table, experts, scratch, table.num_rows)


@compiled
def slots_at(table: PassTable, experts: ExpertTable, scratch: int) -> int:
    """Return where a thread keeps the rows sorted by their experts."""
    return starts_at(table, experts, scratch) + 8 * (num_listed(experts) + 2)


@compiled
def tile_at(table: PassTable, experts: ExpertTable, scratch: int) -> int:
    """Return where a thread has room for rows beside each other."""
    behind = slots_at(table, experts, scratch) + SLOT_BYTES * max(table.num_rows * num_taken(experts), TOGETHER)
    return (behind + _LINE - 1) // _LINE * _LINE


@compiled
def room_at(table: PassTable, experts: ExpertTable, scratch: int) -> int:
    """Return where a thread has room for what it computes."""
    return tile_at(table, experts, scratch) + record_bytes(table) * TOGETHER


@compiled
def rows_of(starts: int, expert: int) -> int:
    """Return how many rows take an expert."""
    return load_int(starts + 8 * (expert + 1)) - load_int(starts + 8 * expert)


@compiled
def gather_row(
    record: int, takes: int, num_groups: int, count: int, first: int, size: int, place: int, tile: int
) -> None:
    """Copy a row to its place among ``count`` rows, in the tile of ``size`` rows that begins with row ``first``."""
    its_scales = scales_behind(record, 1, num_groups)
    its_sums = sums_behind(its_scales, 1, num_groups)
    its_floats = floats_behind(its_sums, 1, num_groups)
    scales = scales_behind(tile, count, num_groups)
    sums = sums_behind(scales, count, num_groups)
    floats = floats_behind(sums, count, num_groups)
    for group in range(num_groups):
        before = first * num_groups + group * size
        if takes & t.AS_BYTES:
            store(tile + GROUP * (before + place), load(record + GROUP * group))
            store_float(scales + 4 * (before + place), load_float(its_scales + 4 * group))
            for part in range(1 + PARTS):
                to = sums + SUMS_BYTES * before + 4 * (size * part + place)
                store_float(to, load_float(its_sums + SUMS_BYTES * group + 4 * part))
        if takes & t.AS_FLOATS:
            to = floats + 4 * GROUP * before + 4 * LANES * place
            copy_group(its_floats + 4 * GROUP * group, to, 4 * LANES * size)


@compiled
def gathered(slots: int, count: int, takes: int, num_groups: int, tile: int) -> int:
    """Return where rows lie beside each other: one is its own record, several are copied to ``tile``."""
    if count == 1:
        return load_int(slots)
    first = 0
    while first < count:
        size = tile_size(count, first)
        for place in range(size):
            record = load_int(slots + SLOT_BYTES * (first + place))
            gather_row(record, takes, num_groups, count, first, size, place, tile)
        first += size
    return tile
