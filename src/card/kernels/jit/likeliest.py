"""The likeliest tokens of rows of scores, and how likely they are: one look for the tokens, and one for the sum."""

from __future__ import annotations

import numpy as np

from card.kernels.jit.rows import ZERO, exponential
from card.kernels.jit.vectors import (
    GROUP,
    LANES,
    Floats,
    add,
    compiled,
    entered,
    fill,
    fma,
    largest,
    load,
    load_float,
    load_int,
    maximum,
    store_float,
    store_int,
    times,
    total,
)

_LOWEST = np.float32(-3e38)


@compiled
def insert(token: int, score: float, place: int, tokens: int, best: int) -> None:
    """Put a token among the ``place`` before it, best first and behind its equals; what stood at ``place`` is lost."""
    while place > 0 and score > load_float(best + 4 * (place - 1)):
        store_float(best + 4 * place, load_float(best + 4 * (place - 1)))
        store_int(tokens + 8 * place, load_int(tokens + 8 * (place - 1)))
        place -= 1
    store_float(best + 4 * place, score)
    store_int(tokens + 8 * place, token)


@compiled
def insert_better(row: int, first: int, end: int, count: int, tokens: int, best: int) -> None:
    """Put those of some tokens of a row among the ``count`` best that belong there."""
    for token in range(first, end):
        score = load_float(row + 4 * token)
        if score > load_float(best + 4 * (count - 1)):
            insert(token, score, count - 1, tokens, best)


@compiled
def find_best(row: int, num_tokens: int, count: int, tokens: int, best: int) -> None:
    """Write the ``count`` best tokens of a row and their scores, best first, of equal ones the first."""
    for token in range(count):
        insert(token, load_float(row + 4 * token), token, tokens, best)
    first = min((count + GROUP - 1) // GROUP * GROUP, num_tokens)
    insert_better(row, count, first, count, tokens, best)
    while first + GROUP <= num_tokens:
        at = row + 4 * first
        most = maximum(load(at), load(at + 4 * LANES))
        most = maximum(most, maximum(load(at + 8 * LANES), load(at + 12 * LANES)))
        if largest(most) > load_float(best + 4 * (count - 1)):
            insert_better(row, first, first + GROUP, count, tokens, best)
        first += GROUP
    insert_better(row, first, num_tokens, count, tokens, best)


@compiled
def fault(x: Floats, before: Floats) -> Floats:
    """Return ``before``, or NaN where a number is NaN or infinity; minus infinity rules a token out."""
    return fma(maximum(fill(_LOWEST), x), fill(ZERO), before)


@compiled
def sum_of_exponentials(row: int, num_tokens: int, top: float, sharpness: float) -> float:
    """Return the sum of e^(sharpness (x - top)) over a row; NaN if it has a fault."""
    low, factor, sums, faults = fill(-top), fill(sharpness), fill(ZERO), fill(ZERO)
    end = num_tokens // LANES * LANES
    for token in range(0, end, LANES):
        part = load(row + 4 * token)
        sums = add(sums, exponential(times(add(part, low), factor)))
        faults = fault(part, faults)
    result = total(sums)
    for token in range(end, num_tokens):
        part = fill(load_float(row + 4 * token))
        result += largest(exponential(times(add(part, low), factor)))
        faults = fault(part, faults)
    return result + total(faults)


@entered
def rank(
    scores: int, num_rows: int, row_bytes: int, num_tokens: int, sharpness: float, count: int, tokens: int,
    best: int, sums: int,
) -> None:  # fmt: skip
    """Find the best tokens of rows of scores that count ``sharpness`` times.

    Args:
        scores: rows of floats, ``row_bytes`` from one to the next.
        tokens, best: places of ``count`` tokens of each row, and of how far each is below the first one.
        sums: places of the sums of all tokens' probabilities in parts of the first one's.
    """
    for row in range(num_rows):
        at, its_tokens, its_best = scores + row_bytes * row, tokens + 8 * count * row, best + 4 * count * row
        find_best(at, num_tokens, count, its_tokens, its_best)
        top = load_float(its_best)
        store_float(sums + 4 * row, sum_of_exponentials(at, num_tokens, top, sharpness))
        for i in range(count):
            store_float(its_best + 4 * i, (load_float(its_best + 4 * i) - top) * sharpness)
