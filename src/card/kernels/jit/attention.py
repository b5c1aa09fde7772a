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
from card.kernels.jit.rows import MINUS_ONE, ONE, ZERO, capped, exponential, rms_norm
from card.kernels.jit.tables import entry, layer_entry, real_entry, row_entry
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    add,
    compiled,
    fill,
    fma,
    largest,
    load,
    load_float,
    load_int,
    maximum,
    store,
    store_float,
    store_halves,
    times,
    total,
)

_NOTHING = np.float32(-3.0e38)  # a score that gets no weight
_MANY_UNITS = 16  # rows times KV heads for each thread: from here on whole KV heads are shared out evenly enough
_UNSEEN, _IN_ORDER, _OWN = 0, 1, 2  # how a row sees a block: see `standing`


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
def norm_all_heads(table: int, layer: int, row: int) -> None:
    """Apply the norms of a row's queries and keys, each over all heads at once."""
    of, heads, kv_heads = layer_entry(table, layer), entry(table, t.HEADS), entry(table, t.KV_HEADS)
    size, padded, eps = entry(table, t.HEAD), entry(table, t.PADDED_HEAD), real_entry(table, t.EPS)
    query = entry(table, t.PROJECTED) + 4 * padded * (heads + 2 * kv_heads) * row
    key = query + 4 * padded * heads
    rms_norm(query, entry(of, t.QUERY_NORM), query, size * heads, padded * heads, eps)
    rms_norm(key, entry(of, t.KEY_NORM), key, size * kv_heads, padded * kv_heads, eps)


@compiled
def prepare_heads(table: int, layer: int, first_row: int, last_row: int, first: int, last: int) -> None:
    """Norm and turn heads ``first`` to ``last`` (queries, keys, values) of some rows; keep keys and values."""
    of = layer_entry(table, layer)
    heads, kv_heads = entry(table, t.HEADS), entry(table, t.KV_HEADS)
    size, padded, eps = entry(table, t.HEAD), entry(table, t.PADDED_HEAD), real_entry(table, t.EPS)
    has_head_norms, turned = not entry(table, t.HAS_WIDE_NORMS), entry(of, t.TURNED)
    for row in range(first_row, last_row):
        its = row_entry(table, row)
        angle = 4 * turned * entry(its, t.ANGLE)
        kept = entry(its, t.KV) + layer * entry(its, t.LAYER_BYTES) + entry(its, t.SLOT) * entry(its, t.KV_ROW)
        for head in range(first, last):
            x = entry(table, t.PROJECTED) + 4 * padded * (row * (heads + 2 * kv_heads) + head)
            if head < heads + kv_heads:
                norm = entry(of, t.QUERY_NORM if head < heads else t.KEY_NORM)
                if norm and has_head_norms:
                    rms_norm(x, norm, x, size, padded, eps)
                if turned:
                    turn(x, entry(of, t.COS) + angle, entry(of, t.SIN) + angle, turned)
            if head >= heads:
                out = kept + (head - heads) * entry(its, t.HEAD_BYTES)
                for at in range(0, padded, LANES):
                    if entry(table, t.KV_BYTES) == 4:
                        store(out + 4 * at, load(x + 4 * at))
                    else:
                        store_halves(out + 2 * at, load(x + 4 * at))


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
def rows_together(table: int, first: int) -> int:
    """Return how many rows from ``first`` on share blocks: rows of one text, of t.TOGETHER queries at most."""
    most = min(max(1, t.TOGETHER * entry(table, t.KV_HEADS) // entry(table, t.HEADS)), entry(table, t.ROWS) - first)
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
    num_vectors, size = entry(table, t.PADDED_HEAD) // LANES, 0
    for row in range(first, last):
        if standing(table, layer, row, position) == _IN_ORDER:
            size = max(size, min(BLOCK, entry(row_entry(table, row), t.POSITION) + 1 - position))
    if size:
        begin = kept + position * entry(row_entry(table, first), t.KV_ROW)
        widen(begin, entry(table, t.KV_BYTES), out, size * num_vectors)
        clear(out + 4 * LANES * size * num_vectors, 4 * LANES * (BLOCK - size) * num_vectors)


@compiled
def widen_own(table: int, row: int, kept: int, position: int, out: int) -> None:
    """Write a block of a row's own text as floats, and zeros behind the row."""
    its, num_vectors = row_entry(table, row), entry(table, t.PADDED_HEAD) // LANES
    row_bytes, prefix, stop = entry(its, t.KV_ROW), entry(its, t.PREFIX), entry(its, t.POSITION) + 1
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
    its, num_vectors = row_entry(table, row), entry(table, t.PADDED_HEAD) // LANES
    stop, num_picked, since = last_seen(table, layer, row), entry(its, t.NUM_PICKED), entry(its, t.SINCE)
    picked = entry(its, t.PICKED) + 8 * num_picked * (layer * entry(table, t.KV_HEADS) + kv_head)
    for at in range(position, position + BLOCK):
        place = out + 4 * LANES * num_vectors * (at - position)
        if at < stop:
            slot = load_int(picked + 8 * at) if at < num_picked else since + at - num_picked
            widen(kept + slot * entry(its, t.KV_ROW), entry(table, t.KV_BYTES), place, num_vectors)
        else:
            clear(place, 4 * LANES * num_vectors)


@compiled
def use_block(
    table: int, first: int, last: int, head: int, last_head: int, block: int, scores: int, width: int, sums: int
) -> None:  # fmt: skip
    """Score a block of keys for queries of rows ``first`` to ``last``, or add one of values to their sums.

    Args:
        head, last_head: query heads.
        scores, width: address of the first query's scores or weights of this block, and bytes from query to query.
        sums: address of the first query's sum; 0 for a block of keys.
    """
    padded, all_heads = entry(table, t.PADDED_HEAD), entry(table, t.HEADS) + 2 * entry(table, t.KV_HEADS)
    num_vectors, num_heads = padded // LANES, last_head - head
    if sums:
        sum_bytes, num_queries = room_of(num_vectors), (last - first) * num_heads
        for one in range(0, num_queries, MOST_QUERIES):
            add_value_block(
                min(MOST_QUERIES, num_queries - one), block, num_vectors, scores + width * one, width,
                sums + sum_bytes * one, sum_bytes,
            )  # fmt: skip
        return
    scale, cap = fill(real_entry(table, t.SCALE)), fill(real_entry(table, t.SCORE_CAP))
    is_capped = entry(table, t.SCORE_CAP) != 0
    for row in range(first, last):
        query = entry(table, t.PROJECTED) + 4 * padded * (row * all_heads + head)
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
    num_heads, sum_bytes = last_head - head, room_of(entry(table, t.PADDED_HEAD) // LANES)
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
                use_block(table, row, following, head, last_head, block, here + width * query, width, its_sums)
            row = following + 1
        for row in range(first, last):
            if standing(table, layer, row, position) == _OWN:
                query = (row - first) * num_heads
                if reads_picked(table, layer, row):
                    kv_head = head * entry(table, t.KV_HEADS) // entry(table, t.HEADS)
                    widen_picked(table, layer, row, kv_head, kept, position, block)
                else:
                    widen_own(table, row, kept, position, block)
                its_sums = sums + sum_bytes * query if sums else 0
                use_block(table, row, row + 1, head, last_head, block, here + width * query, width, its_sums)


@compiled
def keep_scores(
    table: int, layer: int, first: int, last: int, head: int, last_head: int, kind: int, scores: int, width: int
) -> None:  # fmt: skip
    """Keep the sum, for each head, of what rows ``first`` to ``last`` give those that the text held, if it is wanted.

    Args:
        kind: what the scores are by now; arguments else as of `use_block`.
    """
    its, count, num_heads = row_entry(table, first), entry(row_entry(table, first), t.NUM_SCORES), last_head - head
    has_window = entry(layer_entry(table, layer), t.WINDOW) != 0
    if entry(its, t.SCORES) == 0 or has_window or entry(its, t.SCORE_KIND) != kind:
        return
    for one in range(num_heads):
        out = entry(its, t.SCORES) + 4 * count * (layer * entry(table, t.HEADS) + head + one)
        for at in range(0, 4 * count, 4 * LANES):
            sums = load(scores + width * one + at)
            for row in range(1, last - first):
                sums = add(sums, load(scores + width * (row * num_heads + one) + at))
            store(out + at, sums)


@compiled
def keep_queries(table: int, layer: int, first: int, last: int, head: int, last_head: int) -> None:
    """Keep the queries of rows ``first`` to ``last``, if they are wanted instead of scores."""
    padded, all_heads = entry(table, t.PADDED_HEAD), entry(table, t.HEADS) + 2 * entry(table, t.KV_HEADS)
    if entry(layer_entry(table, layer), t.WINDOW) != 0:
        return
    for row in range(first, last):
        its = row_entry(table, row)
        if entry(its, t.SCORES) == 0 or entry(its, t.SCORE_KIND) != t.QUERIES:
            continue
        for one in range(head, last_head):
            query = entry(table, t.PROJECTED) + 4 * padded * (row * all_heads + one)
            out = entry(its, t.SCORES) + 4 * padded * (layer * entry(table, t.HEADS) + one)
            for at in range(0, 4 * padded, 4 * LANES):
                store(out + at, load(query + at))


@compiled
def attend(table: int, layer: int, first: int, last: int, head: int, last_head: int, room: int) -> None:
    """Write the attention of rows ``first`` to ``last``, of one text, for query heads that share a KV head.

    ``room`` has place for BLOCK rows as floats, BEHIND floats, and for each query a sum and the scores.
    """
    heads, kv_heads, padded = entry(table, t.HEADS), entry(table, t.KV_HEADS), entry(table, t.PADDED_HEAD)
    its, num_heads, num_vectors = row_entry(table, first), last_head - head, padded // LANES
    begin, end = first_seen(table, layer, first), 0
    for row in range(first, last):
        begin = min(begin, first_seen(table, layer, row))
        end = max(end, last_seen(table, layer, row))
    begin, end = begin // BLOCK * BLOCK, (end + BLOCK - 1) // BLOCK * BLOCK
    keys = entry(its, t.KV) + layer * entry(its, t.LAYER_BYTES) + head * kv_heads // heads * entry(its, t.HEAD_BYTES)
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
    values = keys + kv_heads * entry(its, t.HEAD_BYTES)
    use_blocks(table, layer, first, last, head, last_head, values, begin, end, room, scores, width, sums)
    row_bytes = 4 * ((heads * padded + GROUP - 1) // GROUP * GROUP)
    for query in range(num_queries):
        row, one = first + query // num_heads, head + query % num_heads
        out = entry(table, t.ATTENDED) + row * row_bytes + 4 * padded * one
        for at in range(0, 4 * padded, 4 * LANES):
            store(out + at, load(sums + query * sum_bytes + at))


@compiled
def attend_part(table: int, layer: int, thread: int, room: int) -> None:
    """Do a thread's part of the attention of all rows.

    With few rows, threads share out the query heads of each, so that none waits though KV heads are few. Otherwise each
    takes whole KV heads, whose blocks then are widened once.
    """
    heads, kv_heads, num_rows = entry(table, t.HEADS), entry(table, t.KV_HEADS), entry(table, t.ROWS)
    threads, group = entry(table, t.THREADS), heads // kv_heads
    is_short = num_rows * kv_heads < _MANY_UNITS * threads
    first = turn = 0
    while first < num_rows:
        last = first + rows_together(table, first)
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
