"""One pass of a Llama-like decoder as one call: all layers, all rows, all threads.

Each row is computed alone: the order of its sums is that of the positions of its own text, of the channels or of the
groups, whatever the rows beside it, its place in the cache, its tile or its thread. Threads share out heads and output
channels, and wait for each other five times a layer, or twice more where what a block adds is normed first.
"""

from __future__ import annotations

import ctypes
import threading
from queue import SimpleQueue
from typing import Any

from card.kernels.jit import tables as t
from card.kernels.jit.attention import attend_part, norm_all_heads, prepare_heads
from card.kernels.jit.rows import (
    add_row,
    bytes_between_rows,
    capped,
    floats_behind,
    gelu,
    multiply_tile,
    prepare_group,
    prepare_rows,
    project,
    rms_norm,
    silu,
    tile_size,
)
from card.kernels.jit.tables import entry, layer_entry, real_entry
from card.kernels.jit.tiles import MOST_ROWS, PANEL
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    SUMS_BYTES,
    arrive,
    compiled,
    entered,
    fill,
    let_others_run,
    load,
    look,
    pause,
    store,
    times,
)

_PATIENCE = 2000  # looks at the others before the core is given away
_PAST_ALL = 1 << 40  # a counter that nobody waits for
_COUNTER_SIZE = 8  # integers that a counter has to itself, a line of the caches


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
def activate(x: int, factor: int, has_gelu: int) -> None:
    """Turn a group of the gate into its activation times the group ``factor``, in place."""
    if has_gelu:
        for at in range(0, 4 * GROUP, 4 * LANES):
            store(x + at, times(gelu(load(x + at)), load(factor + at)))
    else:
        for at in range(0, 4 * GROUP, 4 * LANES):
            store(x + at, times(silu(load(x + at)), load(factor + at)))


@compiled
def gate(
    table: int, layer: int, start: int, stop: int, numbers: int, scales: int, sums: int, room: int
) -> None:  # fmt: skip
    """Compute groups ``start`` to ``stop`` of activation(gate) * up for all rows, and prepare them."""
    of = layer_entry(table, layer)
    num_rows, num_groups = entry(table, t.ROWS), entry(table, t.PADDED_WIDTH) // GROUP
    has_gelu = entry(table, t.HAS_GELU)
    num_out, num_panels, other = entry(table, t.MLP) // GROUP, GROUP // PANEL, room + 4 * GROUP * MOST_ROWS
    takes, gated_sums = entry(of + 8 * t.DOWN, t.TAKES), entry(table, t.GATED_SUMS)
    as_floats = floats_behind(gated_sums, num_rows, num_out)
    for group in range(start, stop):
        first = 0
        while first < num_rows:
            size = tile_size(num_rows, first)
            for linear, out in ((of + 8 * t.GATE, room), (of + 8 * t.UP, other)):
                multiply_tile(
                    linear, num_rows, first, size, num_panels * group, num_panels * (group + 1), numbers, scales, sums,
                    num_groups, out - 4 * GROUP * group, 4 * GROUP, 0,
                )  # fmt: skip
            for row in range(size):
                activate(room + 4 * GROUP * row, other + 4 * GROUP * row, has_gelu)
                place = first * num_out + group * size + row
                prepare_group(
                    takes,
                    room + 4 * GROUP * row,
                    entry(table, t.GATED) + GROUP * (first * num_out + group * size) + bytes_between_rows(size) * row,
                    size,
                    entry(table, t.GATED_SCALES) + 4 * place,
                    gated_sums + SUMS_BYTES * place,
                    as_floats + 4 * GROUP * (first * num_out + group * size) + 4 * row,
                )
            first += size


@compiled
def share(count: int, thread: int, num_threads: int) -> int:
    """Return where the part of a thread starts; that of the next thread is where it stops."""
    return count * thread // num_threads


@compiled
def project_heads(
    table: int, linear: int, count: int, before: int, first: int, last: int, numbers: int, scales: int, sums: int
) -> None:  # fmt: skip
    """Compute those heads of a linear layer that are among ``first`` to ``last`` of all.

    Args:
        count, before: heads of this layer, and of the layers before it.
    """
    heads, padded = entry(table, t.HEADS) + 2 * entry(table, t.KV_HEADS), entry(table, t.PADDED_HEAD)
    start, stop = max(first - before, 0), min(last - before, count)
    project(
        linear, entry(table, t.ROWS), padded // PANEL * start, padded // PANEL * stop, numbers, scales, sums,
        entry(table, t.PADDED_WIDTH) // GROUP, entry(table, t.PROJECTED) + 4 * padded * before, 4 * padded * heads, 0,
    )  # fmt: skip


@compiled
def add_output(
    table: int, linear: int, norm: int, first: int, last: int, numbers: int, scales: int, sums: int, num_groups: int,
    thread: int, turn: int,
) -> int:  # fmt: skip
    """Add panels ``first`` to ``last`` of what a block computes to the hidden states; return the next turn.

    Args:
        norm: weight of a norm to apply first; 0 for none. It sees whole rows, so threads then share out the rows.
    """
    num_rows, threads, barrier = entry(table, t.ROWS), entry(table, t.THREADS), entry(table, t.BARRIER)
    padded, hidden, added = entry(table, t.PADDED_WIDTH), entry(table, t.HIDDEN), entry(table, t.ADDED)
    if not norm:
        project(linear, num_rows, first, last, numbers, scales, sums, num_groups, hidden, 4 * padded, 1)
        return wait(barrier, threads, turn)
    project(linear, num_rows, first, last, numbers, scales, sums, num_groups, added, 4 * padded, 0)
    turn = wait(barrier, threads, turn)
    for row in range(thread, num_rows, threads):
        its = added + 4 * padded * row
        rms_norm(its, norm, its, entry(table, t.WIDTH), padded, real_entry(table, t.EPS))
        add_row(its, hidden + 4 * padded * row, padded)
    return wait(barrier, threads, turn)


@compiled
def cap_logits(table: int, first: int, last: int) -> None:
    """Bound panels ``first`` to ``last`` of all logits."""
    num_bytes, cap = 4 * entry(table, t.VOCAB), fill(real_entry(table, t.LOGIT_CAP))
    for row in range(entry(table, t.NUM_CHOSEN)):
        its = entry(table, t.LOGITS) + num_bytes * row
        for at in range(its + 4 * PANEL * first, its + 4 * PANEL * last, 4 * LANES):
            store(at, capped(load(at), cap))


@compiled
def run_layer(table: int, layer: int, thread: int, turn: int, own: int) -> int:
    """Do a thread's part of a layer; return the next turn."""
    of, num_rows, threads = layer_entry(table, layer), entry(table, t.ROWS), entry(table, t.THREADS)
    width, padded_width, barrier = entry(table, t.WIDTH), entry(table, t.PADDED_WIDTH), entry(table, t.BARRIER)
    heads, kv_heads, padded = entry(table, t.HEADS), entry(table, t.KV_HEADS), entry(table, t.PADDED_HEAD)
    all_heads, attended_groups = heads + 2 * kv_heads, (heads * padded + GROUP - 1) // GROUP
    groups, mlp_groups, eps = padded_width // GROUP, entry(table, t.MLP) // GROUP, real_entry(table, t.EPS)
    hidden, hidden_bytes = entry(table, t.HIDDEN), 4 * padded_width
    most_groups = max(groups, attended_groups)
    numbers, scales = own, own + GROUP * most_groups * num_rows
    sums = scales + 4 * most_groups * num_rows
    room = floats_behind(sums, num_rows, most_groups) + 4 * GROUP * most_groups * (num_rows + 1)
    norm, centres, is_parallel = entry(of, t.INPUT_NORM), entry(table, t.CENTRES), entry(table, t.IS_PARALLEL)
    takes_gated = entry(of + 8 * t.GATE, t.TAKES) | entry(of + 8 * t.UP, t.TAKES)
    takes = entry(of + 8 * t.QUERY, t.TAKES) | entry(of + 8 * t.KEY, t.TAKES) | entry(of + 8 * t.VALUE, t.TAKES)
    if is_parallel:  # the MLP reads what attention reads
        takes |= takes_gated
    prepare_rows(takes, hidden, hidden_bytes, num_rows, width, norm, centres, groups, eps, numbers, scales, sums, 0)
    first, last = share(all_heads, thread, threads), share(all_heads, thread + 1, threads)
    project_heads(table, of + 8 * t.QUERY, heads, 0, first, last, numbers, scales, sums)
    project_heads(table, of + 8 * t.KEY, kv_heads, heads, first, last, numbers, scales, sums)
    project_heads(table, of + 8 * t.VALUE, kv_heads, heads + kv_heads, first, last, numbers, scales, sums)
    if entry(table, t.HAS_WIDE_NORMS):
        turn = wait(barrier, threads, turn)
        for row in range(thread, num_rows, threads):
            norm_all_heads(table, layer, row)
        turn = wait(barrier, threads, turn)
    prepare_heads(table, layer, first, last)
    start, stop = share(mlp_groups, thread, threads), share(mlp_groups, thread + 1, threads)
    if is_parallel:
        gate(table, layer, start, stop, numbers, scales, sums, room)
    turn = wait(barrier, threads, turn)
    attend_part(table, layer, thread, room)
    turn = wait(barrier, threads, turn)
    prepare_rows(
        entry(of + 8 * t.ATTENTION_OUT, t.TAKES), entry(table, t.ATTENDED), 4 * GROUP * attended_groups, num_rows, 0, 0,
        0, attended_groups, eps, numbers, scales, sums, 0,
    )  # fmt: skip
    first = share(padded_width // PANEL, thread, threads)
    last = share(padded_width // PANEL, thread + 1, threads)
    out, norm = of + 8 * t.ATTENTION_OUT, entry(of, t.ATTENTION_OUT_NORM)
    turn = add_output(table, out, norm, first, last, numbers, scales, sums, attended_groups, thread, turn)
    if not is_parallel:
        norm = entry(of, t.MLP_NORM)
        prepare_rows(
            takes_gated, hidden, hidden_bytes, num_rows, width, norm, centres, groups, eps, numbers, scales, sums, 0
        )
        gate(table, layer, start, stop, numbers, scales, sums, room)
        turn = wait(barrier, threads, turn)
    turn = add_output(
        table, of + 8 * t.DOWN, entry(of, t.MLP_OUT_NORM), first, last, entry(table, t.GATED),
        entry(table, t.GATED_SCALES), entry(table, t.GATED_SUMS), mlp_groups, thread, turn,
    )  # fmt: skip
    copy_to = entry(of, t.COPY_TO)
    if copy_to and thread == 0:  # nobody writes to the hidden states before this thread has come to the next layer
        for at in range(0, hidden_bytes * num_rows, 4 * LANES):
            store(copy_to + at, load(hidden + at))
    return turn


@entered
def run(table: int, thread: int) -> None:
    """Do a thread's part of the pass that a table describes; all its threads must be under way at once."""
    threads, own = entry(table, t.THREADS), entry(table, t.OWN) + thread * entry(table, t.OWN_BYTES)
    turn = 1
    for layer in range(entry(table, t.LAYERS)):
        turn = run_layer(table, layer, thread, turn, own)
    num_chosen, groups = entry(table, t.NUM_CHOSEN), entry(table, t.PADDED_WIDTH) // GROUP
    scales = own + GROUP * groups * num_chosen
    sums = scales + 4 * groups * num_chosen
    prepare_rows(
        entry(table + 8 * t.OUTPUT, t.TAKES), entry(table, t.HIDDEN), 4 * GROUP * groups, num_chosen,
        entry(table, t.WIDTH), entry(table, t.NORM), entry(table, t.CENTRES), groups, real_entry(table, t.EPS), own,
        scales, sums, entry(table, t.CHOSEN_ROWS),
    )  # fmt: skip
    panels = entry(table, t.VOCAB) // PANEL
    first, last = share(panels, thread, threads), share(panels, thread + 1, threads)
    out, out_bytes = entry(table, t.LOGITS), 4 * PANEL * panels
    project(table + 8 * t.OUTPUT, num_chosen, first, last, own, scales, sums, groups, out, out_bytes, 0)
    if entry(table, t.LOGIT_CAP):
        cap_logits(table, first, last)
    wait(entry(table, t.BARRIER), threads, turn)


class ThreadTeam:
    """The threads of one decoder; they sleep between passes and end with the process or the decoder."""

    def __init__(self) -> None:
        self._orders: list[SimpleQueue[Any]] = []

    def run(self, table: Any) -> None:
        """Do the pass that a table describes, an array of `ctypes.c_int64` whose addresses stay valid meanwhile."""
        num_threads = table[t.THREADS]
        while len(self._orders) < num_threads - 1:
            orders: SimpleQueue[Any] = SimpleQueue()
            threading.Thread(target=_work, args=(orders, len(self._orders) + 1), daemon=True).start()
            self._orders.append(orders)  # not before: nobody would take what is put there if no thread can be started
        barrier = (ctypes.c_int64 * _COUNTER_SIZE)()  # a new one: others may still look at the last pass's
        table[t.BARRIER] = ctypes.addressof(barrier)
        try:
            for orders in self._orders[: num_threads - 1]:
                orders.put((table, barrier))
            run(ctypes.addressof(table), 0)
        except BaseException:  # an interrupt before this thread's part: the others would wait for it for ever
            barrier[0] = _PAST_ALL
            self._wait_for_others()
            raise

    def _wait_for_others(self) -> None:
        """Return when the others have done what they were told."""
        for orders in self._orders:
            done = threading.Event()
            orders.put(done)
            done.wait()

    def __del__(self) -> None:
        for orders in self._orders:
            orders.put(None)


def _work(orders: SimpleQueue[Any], thread: int) -> None:
    """Do one thread's part of each pass until there are no more."""
    while (order := orders.get()) is not None:
        if isinstance(order, threading.Event):
            order.set()
            continue
        table, _ = order
        run(ctypes.addressof(table), thread)
        del order, table
