"""Attention: each row goes through the positions of its own text in order, wherever the cache holds them.

Rows of one text that lie beside each other in a pass share blocks of 16 positions: keys and values are widened once for
all of them. What is done to a row's numbers, and in which order, does not depend on that.
"""

from __future__ import annotations

from card.kernels.jit import tables as t
from card.kernels.jit.addresses import (
    all_heads,
    attended_bytes,
    cached_at,
    cached_bytes,
    cached_row,
    layer_entry,
    row_entry,
)
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
from card.kernels.jit.attention_scores import Queries, score_vectors, transpose_queries, vectors_of, weigh
from card.kernels.jit.rows import ZERO, capped, sigmoid
from card.kernels.jit.tables import LayerTable, PassTable
from card.kernels.jit.vectors import (
    LANES,
    add,
    compiled,
    fill,
    load,
    load_int,
    store,
    store_float,
    times,
)

_MANY_UNITS = 16  # rows times KV heads for each thread: from here on whole KV heads are shared out evenly enough
_UNSEEN, _IN_ORDER, _OWN = 0, 1, 2  # how a row sees a block: see `standing`


@compiled
def rows_together(table: PassTable, layer: LayerTable, first: int) -> int:
    """Return how many rows from ``first`` on share blocks: rows of one text, of t.TOGETHER queries at most."""
    most = min(max(1, t.TOGETHER * layer.kv_heads // layer.heads), table.num_rows - first)
    count = 1
    while count < most and row_entry(table, first + count).blocks == row_entry(table, first).blocks:
        count += 1
    return count


@compiled
def first_seen(table: PassTable, layer_idx: int, row: int) -> int:
    """Return the first position that a row sees."""
    window = layer_entry(table, layer_idx).window
    return max(0, row_entry(table, row).position + 1 - window) if window else 0


@compiled
def reads_picked(table: PassTable, layer_idx: int, row: int) -> int:
    """Return whether a row reads picked rows and the newest ones, as rows may in layers without a window."""
    return int(row_entry(table, row).picked != 0 and layer_entry(table, layer_idx).window == 0)


@compiled
def last_seen(table: PassTable, layer_idx: int, row: int) -> int:
    """Return the position behind the last one that a row sees; positions are counted among the rows that it reads."""
    row_table = row_entry(table, row)
    unread = row_table.since - row_table.num_picked if reads_picked(table, layer_idx, row) else 0
    return row_table.position + 1 - unread


@compiled
def standing(table: PassTable, layer_idx: int, row: int, position: int) -> int:
    """Return how a row sees a block: not at all; as the cache holds it, from row ``position`` on; or in its own way."""
    row_table, stop = row_entry(table, row), last_seen(table, layer_idx, row)
    if position >= stop or position + BLOCK <= first_seen(table, layer_idx, row):
        return _UNSEEN
    if reads_picked(table, layer_idx, row):
        return _OWN
    return _IN_ORDER if min(position + BLOCK, stop) <= row_table.prefix else _OWN


@compiled
def widen_shared(table: PassTable, layer_idx: int, first: int, last: int, cached: int, position: int, out: int) -> int:
    """Write a block as floats that some of rows ``first`` to ``last`` see in order, with zeros behind what they see.

    Args:
        cached: see `cached_at`.

    Returns: how many positions of the block they see.
    """
    layer, size = layer_entry(table, layer_idx), 0
    num_vectors = layer.padded_head // LANES
    for row in range(first, last):
        if standing(table, layer_idx, row, position) == _IN_ORDER:
            size = max(size, min(BLOCK, row_entry(table, row).position + 1 - position))
    if size:
        begin = cached_row(row_entry(table, first), cached, position, cached_bytes(table, layer))
        widen(begin, table.kv_bytes, out, size * num_vectors)
        clear(out + 4 * LANES * size * num_vectors, 4 * LANES * (BLOCK - size) * num_vectors)
    return size


@compiled
def widen_own(table: PassTable, layer_idx: int, row: int, cached: int, position: int, out: int) -> None:
    """Write a block of a row's own text as floats, and zeros behind the row."""
    layer, row_table = layer_entry(table, layer_idx), row_entry(table, row)
    num_vectors, row_bytes = layer.padded_head // LANES, cached_bytes(table, layer)
    prefix, stop = row_table.prefix, row_table.position + 1
    ancestors = table.ancestors + 8 * row_table.first_ancestor
    for at in range(position, position + BLOCK):
        place = out + 4 * LANES * num_vectors * (at - position)
        if at < stop:
            slot = at if at < prefix else load_int(ancestors + 8 * (at - prefix))
            widen(cached_row(row_table, cached, slot, row_bytes), table.kv_bytes, place, num_vectors)
        else:
            clear(place, 4 * LANES * num_vectors)


@compiled
def widen_picked(
    table: PassTable, layer_idx: int, row: int, kv_head: int, cached: int, position: int, out: int
) -> None:
    """Write a block as floats of the picked rows and the newest ones behind them, and zeros behind the row."""
    layer, row_table = layer_entry(table, layer_idx), row_entry(table, row)
    num_vectors, row_bytes = layer.padded_head // LANES, cached_bytes(table, layer)
    stop, num_picked, since = last_seen(table, layer_idx, row), row_table.num_picked, row_table.since
    picked = row_table.picked + 8 * num_picked * (layer.kv_layer * layer.kv_heads + kv_head)
    prefix, ancestors = row_table.prefix, table.ancestors + 8 * row_table.first_ancestor
    for at in range(position, position + BLOCK):
        place = out + 4 * LANES * num_vectors * (at - position)
        if at < stop:
            newer = since + at - num_picked
            if at < num_picked:
                slot = load_int(picked + 8 * at)
            else:
                slot = newer if newer < prefix else load_int(ancestors + 8 * (newer - prefix))
            widen(cached_row(row_table, cached, slot, row_bytes), table.kv_bytes, place, num_vectors)
        else:
            clear(place, 4 * LANES * num_vectors)


@compiled
def use_block(
    table: PassTable, layer_idx: int, queries: Queries, block: int, scores: int, width: int, sums: int, done: int,
    ahead: int,
) -> None:  # fmt: skip
    """Score a block of keys for some queries, or add one of values to their sums.

    Args:
        scores, width: address of the first query's scores or weights of this block, and bytes from query to query.
        sums: address of the first query's sum; 0 for a block of keys.
        done: how many of the queries have their scores.
        ahead: address of the next block in the cache, which is fetched meanwhile.
    """
    layer, num_heads = layer_entry(table, layer_idx), queries.last_head - queries.head
    padded = layer.padded_head
    num_vectors = padded // LANES
    if sums:
        sum_bytes, num_queries = room_of(num_vectors), (queries.last - queries.first) * num_heads
        for one in range(0, num_queries, MOST_QUERIES):
            add_value_block(
                min(MOST_QUERIES, num_queries - one), block, num_vectors, scores + width * one, width,
                sums + sum_bytes * one, sum_bytes, ahead + LANES * num_vectors * one,
            )  # fmt: skip
        return
    scale, cap = fill(layer.scale), fill(table.score_cap)
    is_capped = table[PassTable.score_cap] != 0
    for row in range(queries.first, queries.last):
        query = table.projected + 4 * padded * (row * all_heads(layer) + queries.head)
        before = (row - queries.first) * num_heads
        for one in range(max(0, done - before), num_heads):
            x = times(score_block(block, query + 4 * padded * one, num_vectors), scale)
            if is_capped:
                x = capped(x, cap)
            store(scores + width * (before + one), x)


@compiled
def use_blocks(
    table: PassTable, layer_idx: int, queries: Queries, cached: int, begin: int, end: int, block: int, scores: int,
    width: int, sums: int, transposed: int,
) -> None:  # fmt: skip
    """Go through the blocks of positions ``begin`` to ``end``; arguments as of `widen_shared` and `use_block`.

    Args:
        transposed: what `transpose_queries` wrote.
    """
    layer, num_heads = layer_entry(table, layer_idx), queries.last_head - queries.head
    sum_bytes, num_queries = room_of(layer.padded_head // LANES), (queries.last - queries.first) * num_heads
    for position in range(begin, end, BLOCK):
        here, next_block = scores + 4 * (position - begin), min(position + BLOCK, end - BLOCK)
        ahead = cached_row(row_entry(table, queries.first), cached, next_block, cached_bytes(table, layer))
        size = widen_shared(table, layer_idx, queries.first, queries.last, cached, position, block)
        if size and not sums:  # what a row does not see gets no weight, and its own blocks are scored below
            score_vectors(table, layer, num_queries, transposed, block, here, width, ahead)
        row = queries.first
        while row < queries.last:
            following = row
            while following < queries.last and standing(table, layer_idx, following, position) == _IN_ORDER:
                following += 1
            if following > row:
                query = (row - queries.first) * num_heads
                its_sums = sums + sum_bytes * query if sums else 0
                use_block(
                    table, layer_idx, Queries(row, following, queries.head, queries.last_head), block,
                    here + width * query, width, its_sums, LANES * vectors_of(num_queries) - query, ahead,
                )  # fmt: skip
            row = following + 1
        for row in range(queries.first, queries.last):
            if standing(table, layer_idx, row, position) == _OWN:
                query = (row - queries.first) * num_heads
                if reads_picked(table, layer_idx, row):
                    kv_head = queries.head * layer.kv_heads // layer.heads
                    widen_picked(table, layer_idx, row, kv_head, cached, position, block)
                else:
                    widen_own(table, layer_idx, row, cached, position, block)
                its_sums = sums + sum_bytes * query if sums else 0
                use_block(
                    table, layer_idx, Queries(row, row + 1, queries.head, queries.last_head), block,
                    here + width * query, width, its_sums, 0, block,
                )  # fmt: skip


@compiled
def keep_scores(table: PassTable, layer_idx: int, queries: Queries, kind: int, scores: int, width: int) -> None:
    """Keep the sum, for each head, of what rows give those that the text held, if it is wanted.

    Args:
        kind: what the scores are by now; arguments else as of `use_block`.
    """
    row_table, count, num_heads = (
        row_entry(table, queries.first),
        row_entry(table, queries.first).num_scores,
        queries.last_head - queries.head,
    )
    layer = layer_entry(table, layer_idx)
    has_window = layer.window != 0
    if row_table.scores == 0 or has_window or row_table.score_kind != kind:
        return
    for one in range(num_heads):
        out = row_table.scores + 4 * count * (layer.kv_layer * layer.heads + queries.head + one)
        for at in range(0, 4 * count, 4 * LANES):
            sums = load(scores + width * one + at)
            for row in range(1, queries.last - queries.first):
                sums = add(sums, load(scores + width * (row * num_heads + one) + at))
            store(out + at, sums)


@compiled
def keep_queries(table: PassTable, layer_idx: int, queries: Queries) -> None:
    """Keep the queries, if they are wanted instead of scores."""
    layer = layer_entry(table, layer_idx)
    padded = layer.padded_head
    if layer.window != 0:
        return
    for row in range(queries.first, queries.last):
        row_table = row_entry(table, row)
        if row_table.scores == 0 or row_table.score_kind != t.QUERIES:
            continue
        for one in range(queries.head, queries.last_head):
            query = table.projected + 4 * padded * (row * all_heads(layer) + one)
            out = row_table.scores + 4 * padded * (layer.kv_layer * layer.heads + one)
            for at in range(0, 4 * padded, 4 * LANES):
                store(out + at, load(query + at))


@compiled
def attend(table: PassTable, layer_idx: int, queries: Queries, room: int) -> None:
    """Write the attention of queries whose heads share a KV head.

    ``room`` has place for BLOCK rows as floats, BEHIND floats, what `transpose_queries` writes, and for each query, or
    lane of a vector of them, a sum and the scores.
    """
    layer = layer_entry(table, layer_idx)
    heads, kv_heads, padded = layer.heads, layer.kv_heads, layer.padded_head
    num_heads, num_vectors = queries.last_head - queries.head, padded // LANES
    begin, end = first_seen(table, layer_idx, queries.first), 0
    for row in range(queries.first, queries.last):
        begin = min(begin, first_seen(table, layer_idx, row))
        end = max(end, last_seen(table, layer_idx, row))
    begin, end = begin // BLOCK * BLOCK, (end + BLOCK - 1) // BLOCK * BLOCK
    kv_head = queries.head * kv_heads // heads
    keys, values = cached_at(table, layer, kv_head), cached_at(table, layer, kv_heads + kv_head)
    transposed, sum_bytes = room + 4 * (BLOCK * padded + BEHIND), room_of(num_vectors)
    num_queries = (queries.last - queries.first) * num_heads
    sums = transposed + 4 * LANES * padded * vectors_of(num_queries)
    scores, width = sums + num_queries * sum_bytes, 4 * (end - begin + LANES)  # weights are made in whole vectors
    transpose_queries(table, layer, queries, sums, transposed)
    use_blocks(table, layer_idx, queries, keys, begin, end, room, scores, width, 0, transposed)
    keep_queries(table, layer_idx, queries)
    keep_scores(table, layer_idx, queries, t.LOGITS_OF_ROWS, scores, width)
    sinks = layer_entry(table, layer_idx).sinks
    for query in range(num_queries):
        row, its_scores = queries.first + query // num_heads, scores + width * query
        start, stop = first_seen(table, layer_idx, row), last_seen(table, layer_idx, row)
        sink = sinks + 4 * (queries.head + query % num_heads) if sinks else 0
        weigh(its_scores + 4 * (start - begin), stop - start, sink)
        for at in range(start - begin):
            store_float(its_scores + 4 * at, ZERO)
        for at in range(stop - begin, end - begin):
            store_float(its_scores + 4 * at, ZERO)
    keep_scores(table, layer_idx, queries, t.WEIGHTS_OF_ROWS, scores, width)
    clear(sums, num_queries * sum_bytes)
    use_blocks(table, layer_idx, queries, values, begin, end, room, scores, width, sums, transposed)
    row_bytes, gates = attended_bytes(layer), layer.more_heads
    for query in range(num_queries):
        row, one = queries.first + query // num_heads, queries.head + query % num_heads
        out = table.attended + row * row_bytes + 4 * padded * one
        gate = table.projected + 4 * padded * (row * all_heads(layer) + heads + 2 * kv_heads + one)
        for at in range(0, 4 * padded, 4 * LANES):
            x = load(sums + query * sum_bytes + at)
            if gates:
                x = times(x, sigmoid(load(gate + at)))
            store(out + at, x)
        if one == heads - 1:  # zeros behind the last head: another layer may have had numbers there
            clear(out + 4 * padded, row_bytes - 4 * padded * heads)


@compiled
def attend_part(table: PassTable, layer_idx: int, thread: int, room: int) -> None:
    """Do a thread's part of the attention of all rows.

    With few rows, threads share out the query heads of each, so that none waits though KV heads are few. Otherwise each
    takes whole KV heads, whose blocks then are widened once.
    """
    layer, num_rows, threads = layer_entry(table, layer_idx), table.num_rows, table.num_threads
    heads, kv_heads = layer.heads, layer.kv_heads
    group = heads // kv_heads
    is_short = num_rows * kv_heads < _MANY_UNITS * threads
    first = turn = 0
    while first < num_rows:
        last = first + rows_together(table, layer, first)
        turned = (thread + turn) % threads
        for kv_head in range(kv_heads):
            head, last_head = group * kv_head, group * (kv_head + 1)
            if is_short:
                head, last_head = max(head, heads * turned // threads), min(last_head, heads * (turned + 1) // threads)
            elif (turn + kv_head) % threads != thread:
                continue
            if head < last_head:
                attend(table, layer_idx, Queries(first, last, head, last_head), room)
        first, turn = last, turn + (1 if is_short else kv_heads)
