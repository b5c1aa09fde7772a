"""One pass of a Llama-like decoder as one call: all layers, all rows, all threads.

Each row is computed alone: the order of its sums is that of the positions of its own text, of the channels or of the
groups, whatever the rows beside it, its place in the cache, its tile or its thread. Threads share out heads and output
channels, and wait for each other five times a layer.
"""

from __future__ import annotations

from card.models.jit.attention import attend, prepare_heads
from card.models.jit.compiled import compiled
from card.models.jit.rows import (
    bytes_between_fours,
    bytes_between_rows,
    project,
    quantize_rows,
    silu,
    tile_size,
)
from card.models.jit.tables import (
    ATTENDED,
    ATTENTION_OUT,
    BARRIER,
    CHOSEN_ROWS,
    COPY_TO,
    DOWN,
    EPS,
    GATE,
    GATED,
    GATED_SCALES,
    GATED_STARTS,
    HEADS,
    HIDDEN,
    INPUT_NORM,
    KV_HEADS,
    LAYERS,
    LOGITS,
    MLP,
    MLP_NORM,
    MULTIPLIER,
    NORM,
    NUM_CHOSEN,
    OUTPUT,
    OWN,
    OWN_BYTES,
    PADDED_HEAD,
    PADDED_WIDTH,
    PROJECTED,
    QKV,
    ROWS,
    THREADS,
    UP,
    VOCAB,
    WIDTH,
    entry,
    layer_entry,
    real_entry,
)
from card.models.jit.tiles import MOST_ROWS, PANEL, multiply
from card.models.jit.vectors import (
    GROUP,
    LANES,
    arrive,
    let_others_run,
    load,
    look,
    pause,
    quantize_group,
    store,
    times,
)

_PATIENCE = 2000  # looks at the others before the core is given away


@compiled
def wait(counter: int, num_threads: int, turn: int) -> int:
    """Wait until all threads have come so far; return the next turn."""
    if num_threads > 1:
        arrive(counter)
        looks = 0
        while look(counter) < num_threads * turn:
            looks += 1
            if looks > _PATIENCE:
                let_others_run()
            else:
                pause()
    return turn + 1


@compiled
def gate(
    table: int, layer: int, start: int, stop: int, numbers: int, scales: int, starts: int, room: int
) -> None:  # fmt: skip
    """Compute groups ``start`` to ``stop`` of silu(gate) * up for all rows, and quantize them."""
    of = layer_entry(table, layer)
    num_rows, num_groups = entry(table, ROWS), entry(table, PADDED_WIDTH) // GROUP
    num_out, num_panels, other = entry(table, MLP) // GROUP, GROUP // PANEL, room + 4 * GROUP * MOST_ROWS
    multiplier, panel_bytes = entry(table, MULTIPLIER), PANEL * GROUP * num_groups
    for group in range(start, stop):
        first = 0
        while first < num_rows:
            size = tile_size(num_rows, first)
            before = first * num_groups
            for linear, out in ((of + 8 * GATE, room), (of + 8 * UP, other)):
                multiply(
                    multiplier, size, 0, num_panels, entry(linear, 0) + group * num_panels * panel_bytes, panel_bytes,
                    numbers + GROUP * before, scales + 4 * before, starts + 4 * before, num_groups,
                    entry(linear, 1) + 4 * GROUP * group, entry(linear, 2) + 4 * GROUP * group, out, 4 * GROUP, 0,
                )  # fmt: skip
            for row in range(size):
                for at in range(4 * GROUP * row, 4 * GROUP * (row + 1), 4 * LANES):
                    store(room + at, times(silu(load(room + at)), load(other + at)))
                place = 4 * (first * num_out + group * size + row)
                quantize_group(
                    room + 4 * GROUP * row,
                    entry(table, GATED) + GROUP * (first * num_out + group * size) + bytes_between_rows(size) * row,
                    bytes_between_fours(size),
                    entry(table, GATED_SCALES) + place,
                    entry(table, GATED_STARTS) + place,
                )
            first += size


@compiled
def share(count: int, thread: int, num_threads: int) -> int:
    """Return where the part of a thread starts; that of the next thread is where it stops."""
    return count * thread // num_threads


@compiled
def run_layer(table: int, layer: int, thread: int, turn: int, own: int) -> int:
    """Do a thread's part of a layer; return the next turn."""
    of, num_rows, threads = layer_entry(table, layer), entry(table, ROWS), entry(table, THREADS)
    width, padded_width, barrier = entry(table, WIDTH), entry(table, PADDED_WIDTH), entry(table, BARRIER)
    heads, kv_heads, padded = entry(table, HEADS), entry(table, KV_HEADS), entry(table, PADDED_HEAD)
    all_heads, attended_groups = heads + 2 * kv_heads, (heads * padded + GROUP - 1) // GROUP
    groups, mlp_groups, eps = padded_width // GROUP, entry(table, MLP) // GROUP, real_entry(table, EPS)
    multiplier, hidden, hidden_bytes = entry(table, MULTIPLIER), entry(table, HIDDEN), 4 * padded_width
    most_groups = max(groups, attended_groups)
    numbers, scales = own, own + GROUP * most_groups * num_rows
    starts = scales + 4 * most_groups * num_rows
    room = starts + 4 * most_groups * num_rows + 4 * GROUP * most_groups
    norm = entry(of, INPUT_NORM)
    quantize_rows(hidden, hidden_bytes, num_rows, width, norm, groups, eps, numbers, scales, starts, 0)
    first, last = share(all_heads, thread, threads), share(all_heads, thread + 1, threads)
    project(
        multiplier, of + 8 * QKV, num_rows, padded // PANEL * first, padded // PANEL * last, numbers, scales, starts,
        groups, entry(table, PROJECTED), 4 * padded * all_heads, 0,
    )  # fmt: skip
    prepare_heads(table, layer, first, last)
    turn = wait(barrier, threads, turn)
    for unit in range(thread, num_rows * kv_heads, threads):
        attend(table, layer, unit // kv_heads, unit % kv_heads, room)
    turn = wait(barrier, threads, turn)
    quantize_rows(
        entry(table, ATTENDED), 4 * GROUP * attended_groups, num_rows, 0, 0, attended_groups, eps, numbers, scales,
        starts, 0,
    )  # fmt: skip
    first = share(padded_width // PANEL, thread, threads)
    last = share(padded_width // PANEL, thread + 1, threads)
    out = of + 8 * ATTENTION_OUT
    project(multiplier, out, num_rows, first, last, numbers, scales, starts, attended_groups, hidden, hidden_bytes, 1)
    turn = wait(barrier, threads, turn)
    norm = entry(of, MLP_NORM)
    quantize_rows(hidden, hidden_bytes, num_rows, width, norm, groups, eps, numbers, scales, starts, 0)
    start, stop = share(mlp_groups, thread, threads), share(mlp_groups, thread + 1, threads)
    gate(table, layer, start, stop, numbers, scales, starts, room)
    turn = wait(barrier, threads, turn)
    project(
        multiplier, of + 8 * DOWN, num_rows, first, last, entry(table, GATED), entry(table, GATED_SCALES),
        entry(table, GATED_STARTS), mlp_groups, hidden, hidden_bytes, 1,
    )  # fmt: skip
    turn = wait(barrier, threads, turn)
    copy_to = entry(of, COPY_TO)
    if copy_to and thread == 0:  # nobody writes to the hidden states before this thread has come to the next layer
        for at in range(0, hidden_bytes * num_rows, 4 * LANES):
            store(copy_to + at, load(hidden + at))
    return turn


@compiled
def run(table: int, thread: int) -> None:
    """Do a thread's part of the pass that a table describes; all its threads must be under way at once."""
    threads, own = entry(table, THREADS), entry(table, OWN) + thread * entry(table, OWN_BYTES)
    turn = 1
    for layer in range(entry(table, LAYERS)):
        turn = run_layer(table, layer, thread, turn, own)
    num_chosen, groups = entry(table, NUM_CHOSEN), entry(table, PADDED_WIDTH) // GROUP
    scales = own + GROUP * groups * num_chosen
    starts = scales + 4 * groups * num_chosen
    quantize_rows(
        entry(table, HIDDEN), 4 * GROUP * groups, num_chosen, entry(table, WIDTH), entry(table, NORM), groups,
        real_entry(table, EPS), own, scales, starts, entry(table, CHOSEN_ROWS),
    )  # fmt: skip
    panels = entry(table, VOCAB) // PANEL
    first, last = share(panels, thread, threads), share(panels, thread + 1, threads)
    out, out_bytes = entry(table, LOGITS), 4 * PANEL * panels
    project(
        entry(table, MULTIPLIER),
        table + 8 * OUTPUT,
        num_chosen,
        first,
        last,
        own,
        scales,
        starts,
        groups,
        out,
        out_bytes,
        0,
    )
    wait(entry(table, BARRIER), threads, turn)
