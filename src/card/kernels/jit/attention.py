"""Attention: each row goes through the positions of its own text in order, wherever the cache holds them.

Rows of one text that lie beside each other in a pass share blocks of 16 positions: keys and values are widened once for
all of them. What is done to a row's numbers, and in which order, does not depend on that.
"""

from __future__ import annotations

import numpy as np

from card.kernels.jit import tables as t
from card.kernels.jit.attention_blocks import (
    BEHIND,
    BLOCK,
    MOST_QUERIES,
    add_value_block,
    clear,
    room_of,
    score_block,
    widen,
)
from card.kernels.jit.rows import ONE, ZERO, capped, exponential, sigmoid
from card.kernels.jit.tables import (
    all_heads,
    attended_bytes,
    entry,
    kept_at,
    kept_bytes,
    layer_entry,
    real_entry,
    row_entry,
)
from card.kernels.jit.vectors import (
    LANES,
    add,
    compiled,
    fill,
    largest,
    load,
    load_float,
    load_int,
    maximum,
    store,
    store_float,
    times,
    total,
)

_NOTHING = np.float32(-3.0e38)  # a score that gets no weight
_MANY_UNITS = 16  # rows times KV heads for each thread: from here on whole KV heads are shared out evenly enough
_UNSEEN, _IN_ORDER, _OWN = 0, 1, 2  # how a row sees a block: see `standing`


@compiled
def weigh(scores: int, seen: int, sink: int) -> None:
    """Turn scores into weights whose sum is 1, in place, with weights of 0 up to a whole vector.

    ``sink`` is the address of one more score, whose weight is left out and comes last in the sum; 0: there is none.
    """
    end = 4 * seen
    width = (end + 4 * LANES - 1) // (4 * LANES) * (4 * LANES)
    for at in range(end, width, 4):
        store_float(scores + at, _NOTHING)
    most = load(scores)
    for at in range(4 * LANES, width, 4 * LANES):
        most = maximum(most, load(scores + at))
    if sink:
        most = maximum(most, fill(load_float(sink)))
    top = fill(-largest(most))
    for at in range(0, width, 4 * LANES):
        store(scores + at, exponential(add(load(scores + at), top)))
    for at in range(end, width, 4):
        store_float(scores + at, ZERO)
    sums = fill(ZERO)
    for at in range(0, width, 4 * LANES):
        sums = add(sums, load(scores + at))
    whole = total(sums)
    if sink:
        whole = whole + largest(exponential(add(fill(load_float(sink)), top)))
    share = fill(ONE / whole)
    for at in range(0, width, 4 * LANES):
        store(scores + at, times(load(scores + at), share))


@compiled
def rows_together(table: int, of: int, first: int) -> int:
    """Return how many rows from ``first`` on share blocks: rows of one text, of t.TOGETHER queries at most."""
    most = min(max(1, t.TOGETHER * entry(of, t.KV_HEADS) // entry(of, t.HEADS)), entry(table, t.ROWS) - first)
    count = 1
    while count < most and entry(row_entry(table, first + count), t.KV) == entry(row_entry(table, first), t.KV):
        count += 1
    return count


@compiled
def first_seen(table: int, layer: int, row: int) -> int:
    """Return the first position that a row sees."""
    window = entry(layer_entry(table, layer), t.WINDOW)
    return max(0, entry(row_entry(table, row), t.POSITION) + 1 - window) if window else 0


@compiled
def reads_picked(table: int, layer: int, row: int) -> int:
    """Return whether a row reads picked rows and the newest ones, as rows may in layers without a window."""
    return int(entry(row_entry(table, row), t.PICKED) != 0 and entry(layer_entry(table, layer), t.WINDOW) == 0)


@compiled
def last_seen(table: int, layer: int, row: int) -> int:
    """Return the position behind the last one that a row sees; positions are counted among the rows that it reads."""
    its = row_entry(table, row)
    unread = entry(its, t.SINCE) - entry(its, t.NUM_PICKED) if reads_picked(table, layer, row) else 0
    return entry(its, t.POSITION) + 1 - unread


@compiled
def standing(table: int, layer: int, row: int, position: int) -> int:
    """Return how a row sees a block: not at all; as the cache holds it, from row ``position`` on; or in its own way."""
    its, stop = row_entry(table, row), last_seen(table, layer, row)
    if position >= stop or position + BLOCK <= first_seen(table, layer, row):
        return _UNSEEN
    if reads_picked(table, layer, row):
        return _OWN
    return _IN_ORDER if min(position + BLOCK, stop) <= entry(its, t.PREFIX) else _OWN


@compiled
def widen_shared(table: int, layer: int, first: int, last: int, kept: int, position: int, out: int) -> None:
    """Write a block as floats that some of rows ``first`` to ``last`` see in order, with zeros behind what they see.

    Args:
        kept: address of the keys or values of the text's row 0.
    """
    of, size = layer_entry(table, layer), 0
    num_vectors = entry(of, t.PADDED_HEAD) // LANES
    for row in range(first, last):
        if standing(table, layer, row, position) == _IN_ORDER:
            size = max(size, min(BLOCK, entry(row_entry(table, row), t.POSITION) + 1 - position))
    if size:
        begin = kept + position * kept_bytes(table, of)
        widen(begin, entry(table, t.KV_BYTES), out, size * num_vectors)
        clear(out + 4 * LANES * size * num_vectors, 4 * LANES * (BLOCK - size) * num_vectors)


@compiled
def widen_own(table: int, layer: int, row: int, kept: int, position: int, out: int) -> None:
    """Write a block of a row's own text as floats, and zeros behind the row."""
    of, its = layer_entry(table, layer), row_entry(table, row)
    num_vectors, row_bytes = entry(of, t.PADDED_HEAD) // LANES, kept_bytes(table, of)
    prefix, stop = entry(its, t.PREFIX), entry(its, t.POSITION) + 1
    ancestors = entry(table, t.ANCESTORS) + 8 * entry(its, t.FIRST_ANCESTOR)
    for at in range(position, position + BLOCK):
        place = out + 4 * LANES * num_vectors * (at - position)
        if at < stop:
            slot = at if at < prefix else load_int(ancestors + 8 * (at - prefix))
            widen(kept + slot * row_bytes, entry(table, t.KV_BYTES), place, num_vectors)
        else:
            clear(place, 4 * LANES * num_vectors)


@compiled
def widen_picked(table: int, layer: int, row: int, kv_head: int, kept: int, position: int, out: int) -> None:
    """Write a block as floats of the picked rows and the newest ones behind them, and zeros behind the row."""
    of, its = layer_entry(table, layer), row_entry(table, row)
    num_vectors, row_bytes = entry(of, t.PADDED_HEAD) // LANES, kept_bytes(table, of)
    stop, num_picked, since = last_seen(table, layer, row), entry(its, t.NUM_PICKED), entry(its, t.SINCE)
    picked = entry(its, t.PICKED) + 8 * num_picked * (entry(of, t.KV_LAYER) * entry(of, t.KV_HEADS) + kv_head)
    for at in range(position, position + BLOCK):
        place = out + 4 * LANES * num_vectors * (at - position)
        if at < stop:
            slot = load_int(picked + 8 * at) if at < num_picked else since + at - num_picked
            widen(kept + slot * row_bytes, entry(table, t.KV_BYTES), place, num_vectors)
        else:
            clear(place, 4 * LANES * num_vectors)


@compiled
def use_block(
    table: int, layer: int, first: int, last: int, head: int, last_head: int, block: int, scores: int, width: int,
    sums: int,
) -> None:  # fmt: skip
    """Score a block of keys for queries of rows ``first`` to ``last``, or add one of values to their sums.

    Args:
        head, last_head: query heads.
        scores, width: address of the first query's scores or weights of this block, and bytes from query to query.
        sums: address of the first query's sum; 0 for a block of keys.
    """
    of, num_heads = layer_entry(table, layer), last_head - head
    padded = entry(of, t.PADDED_HEAD)
    num_vectors = padded // LANES
    if sums:
        sum_bytes, num_queries = room_of(num_vectors), (last - first) * num_heads
        for one in range(0, num_queries, MOST_QUERIES):
            add_value_block(
                min(MOST_QUERIES, num_queries - one), block, num_vectors, scores + width * one, width,
                sums + sum_bytes * one, sum_bytes,
            )  # fmt: skip
        return
    scale, cap = fill(real_entry(of, t.SCALE)), fill(real_entry(table, t.SCORE_CAP))
    is_capped = entry(table, t.SCORE_CAP) != 0
    for row in range(first, last):
        query = entry(table, t.PROJECTED) + 4 * padded * (row * all_heads(of) + head)
        for one in range(num_heads):
            x = times(score_block(block, query + 4 * padded * one, num_vectors), scale)
            if is_capped:
                x = capped(x, cap)
            store(scores + width * ((row - first) * num_heads + one), x)


@compiled
def use_blocks(
    table: int, layer: int, first: int, last: int, head: int, last_head: int, kept: int, begin: int, end: int,
    block: int, scores: int, width: int, sums: int,
) -> None:  # fmt: skip
    """Go through the blocks of positions ``begin`` to ``end``; arguments as of `widen_shared` and `use_block`."""
    of, num_heads = layer_entry(table, layer), last_head - head
    sum_bytes = room_of(entry(of, t.PADDED_HEAD) // LANES)
    for position in range(begin, end, BLOCK):
        here = scores + 4 * (position - begin)
        widen_shared(table, layer, first, last, kept, position, block)
        row = first
        while row < last:
            following = row
            while following < last and standing(table, layer, following, position) == _IN_ORDER:
                following += 1
            if following > row:
                query = (row - first) * num_heads
                its_sums = sums + sum_bytes * query if sums else 0
                use_block(table, layer, row, following, head, last_head, block, here + width * query, width, its_sums)
            row = following + 1
        for row in range(first, last):
            if standing(table, layer, row, position) == _OWN:
                query = (row - first) * num_heads
                if reads_picked(table, layer, row):
                    kv_head = head * entry(of, t.KV_HEADS) // entry(of, t.HEADS)
                    widen_picked(table, layer, row, kv_head, kept, position, block)
                else:
                    widen_own(table, layer, row, kept, position, block)
                its_sums = sums + sum_bytes * query if sums else 0
                use_block(table, layer, row, row + 1, head, last_head, block, here + width * query, width, its_sums)


@compiled
def keep_scores(
    table: int, layer: int, first: int, last: int, head: int, last_head: int, kind: int, scores: int, width: int
) -> None:  # fmt: skip
    """Keep the sum, for each head, of what rows ``first`` to ``last`` give those that the text held, if it is wanted.

    Args:
        kind: what the scores are by now; arguments else as of `use_block`.
    """
    its, count, num_heads = row_entry(table, first), entry(row_entry(table, first), t.NUM_SCORES), last_head - head
    of = layer_entry(table, layer)
    has_window = entry(of, t.WINDOW) != 0
    if entry(its, t.SCORES) == 0 or has_window or entry(its, t.SCORE_KIND) != kind:
        return
    for one in range(num_heads):
        out = entry(its, t.SCORES) + 4 * count * (entry(of, t.KV_LAYER) * entry(of, t.HEADS) + head + one)
        for at in range(0, 4 * count, 4 * LANES):
            sums = load(scores + width * one + at)
            for row in range(1, last - first):
                sums = add(sums, load(scores + width * (row * num_heads + one) + at))
            store(out + at, sums)


@compiled
def keep_queries(table: int, layer: int, first: int, last: int, head: int, last_head: int) -> None:
    """Keep the queries of rows ``first`` to ``last``, if they are wanted instead of scores."""
    of = layer_entry(table, layer)
    padded = entry(of, t.PADDED_HEAD)
    if entry(of, t.WINDOW) != 0:
        return
    for row in range(first, last):
        its = row_entry(table, row)
        if entry(its, t.SCORES) == 0 or entry(its, t.SCORE_KIND) != t.QUERIES:
            continue
        for one in range(head, last_head):
            query = entry(table, t.PROJECTED) + 4 * padded * (row * all_heads(of) + one)
            out = entry(its, t.SCORES) + 4 * padded * (entry(of, t.KV_LAYER) * entry(of, t.HEADS) + one)
            for at in range(0, 4 * padded, 4 * LANES):
                store(out + at, load(query + at))


@compiled
def attend(table: int, layer: int, first: int, last: int, head: int, last_head: int, room: int) -> None:
    """Write the attention of rows ``first`` to ``last``, of one text, for query heads that share a KV head.

    ``room`` has place for BLOCK rows as floats, BEHIND floats, and for each query a sum and the scores.
    """
    of = layer_entry(table, layer)
    heads, kv_heads, padded = entry(of, t.HEADS), entry(of, t.KV_HEADS), entry(of, t.PADDED_HEAD)
    its, num_heads, num_vectors = row_entry(table, first), last_head - head, padded // LANES
    begin, end = first_seen(table, layer, first), 0
    for row in range(first, last):
        begin = min(begin, first_seen(table, layer, row))
        end = max(end, last_seen(table, layer, row))
    begin, end = begin // BLOCK * BLOCK, (end + BLOCK - 1) // BLOCK * BLOCK
    kv_head = head * kv_heads // heads
    keys, values = kept_at(table, of, its, kv_head), kept_at(table, of, its, kv_heads + kv_head)
    sums, sum_bytes = room + 4 * (BLOCK * padded + BEHIND), room_of(num_vectors)
    num_queries = (last - first) * num_heads
    scores, width = sums + num_queries * sum_bytes, 4 * (end - begin + LANES)  # weights are made in whole vectors
    use_blocks(table, layer, first, last, head, last_head, keys, begin, end, room, scores, width, 0)
    keep_queries(table, layer, first, last, head, last_head)
    keep_scores(table, layer, first, last, head, last_head, t.LOGITS_OF_ROWS, scores, width)
    sinks = entry(layer_entry(table, layer), t.SINKS)
    for query in range(num_queries):
        row, its_scores = first + query // num_heads, scores + width * query
        start, stop = first_seen(table, layer, row), last_seen(table, layer, row)
        sink = sinks + 4 * (head + query % num_heads) if sinks else 0
        weigh(its_scores + 4 * (start - begin), stop - start, sink)
        for at in range(start - begin):
            store_float(its_scores + 4 * at, ZERO)
        for at in range(stop - begin, end - begin):
            store_float(its_scores + 4 * at, ZERO)
    keep_scores(table, layer, first, last, head, last_head, t.WEIGHTS_OF_ROWS, scores, width)
    clear(sums, num_queries * sum_bytes)
    use_blocks(table, layer, first, last, head, last_head, values, begin, end, room, scores, width, sums)
    row_bytes, gates = attended_bytes(of), entry(of, t.MORE_HEADS)
    for query in range(num_queries):
        row, one = first + query // num_heads, head + query % num_heads
        out = entry(table, t.ATTENDED) + row * row_bytes + 4 * padded * one
        gate = entry(table, t.PROJECTED) + 4 * padded * (row * all_heads(of) + heads + 2 * kv_heads + one)
        for at in range(0, 4 * padded, 4 * LANES):
            x = load(sums + query * sum_bytes + at)
            if gates:
                x = times(x, sigmoid(load(gate + at)))
            store(out + at, x)
        if one == heads - 1:  # zeros behind the last head: another layer may have had numbers there
            clear(out + 4 * padded, row_bytes - 4 * padded * heads)


@compiled
def attend_part(table: int, layer: int, thread: int, room: int) -> None:
    """Do a thread's part of the attention of all rows.

    With few rows, threads share out the query heads of each, so that none waits though KV heads are few. Otherwise each
    takes whole KV heads, whose blocks then are widened once.
    """
    of, num_rows, threads = layer_entry(table, layer), entry(table, t.ROWS), entry(table, t.THREADS)
    heads, kv_heads = entry(of, t.HEADS), entry(of, t.KV_HEADS)
    group = heads // kv_heads
    is_short = num_rows * kv_heads < _MANY_UNITS * threads
    first = turn = 0
    while first < num_rows:
        last = first + rows_together(table, of, first)
        its = (thread + turn) % threads
        for kv_head in range(kv_heads):
            head, last_head = group * kv_head, group * (kv_head + 1)
            if is_short:
                head, last_head = max(head, heads * its // threads), min(last_head, heads * (its + 1) // threads)
            elif (turn + kv_head) % threads != thread:
                continue
            if head < last_head:
                attend(table, layer, first, last, head, last_head, room)
        first, turn = last, turn + (1 if is_short else kv_heads)
