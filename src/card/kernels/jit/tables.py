"""Arguments of a pass: tables of 64-bit integers, most of them addresses; here are their places."""

from __future__ import annotations

from card.kernels.jit.vectors import compiled, load_float, load_int

# Places in the table of a pass. A linear layer takes three: panels, channel scales, biases.
(
    ROWS, THREADS, LAYERS, WIDTH, PADDED_WIDTH, HEADS, KV_HEADS, HEAD, PADDED_HEAD, MLP, VOCAB, LAYER_TABLE, NORM,
    OUTPUT, _OUTPUT_SCALES, _OUTPUT_BIASES, EPS, SCALE, COS, SIN, ROW_TABLE, ANCESTORS, HIDDEN, PROJECTED, ATTENDED,
    GATED, GATED_SCALES, GATED_STARTS, OWN, OWN_BYTES, BARRIER, CHOSEN_ROWS, NUM_CHOSEN, LOGITS, MULTIPLIER, TABLE_SIZE,
) = range(36)  # fmt: skip
# Places in the table of a layer.
INPUT_NORM, QKV, QUERY_NORM, KEY_NORM, ATTENTION_OUT, MLP_NORM, GATE, UP, DOWN, WINDOW, COPY_TO, LAYER_SIZE = (
    0, 1, 4, 5, 6, 9, 10, 13, 16, 19, 20, 21,
)  # fmt: skip
# Places in the table of a row: where its sequence's keys of layer 0 are; bytes between rows, KV heads and layers; its
# own row there, its position, how many of the first rows it sees, and the first of its other ancestors.
KV, KV_ROW, HEAD_BYTES, LAYER_BYTES, SLOT, POSITION, PREFIX, FIRST_ANCESTOR, ROW_SIZE = range(9)


@compiled
def entry(table: int, place: int) -> int:
    """Return what a table holds at a place."""
    return load_int(table + 8 * place)


@compiled
def real_entry(table: int, place: int) -> float:
    """Return the float32 that a table holds at a place."""
    return load_float(table + 8 * place)


@compiled
def layer_entry(table: int, layer: int) -> int:
    """Return the address of a layer's table."""
    return entry(table, LAYER_TABLE) + 8 * LAYER_SIZE * layer


@compiled
def row_entry(table: int, row: int) -> int:
    """Return the address of a row's table."""
    return entry(table, ROW_TABLE) + 8 * ROW_SIZE * row
