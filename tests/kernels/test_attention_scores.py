"""Scores of many queries at once have the bits that each query's own scores have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code
from card.kernels.number_types import empty

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LANES, SCALE = 16, 0.3
if REASON is None:
    scores_code: Any = machine_code("attention_scores")
    MOST_VECTORS = scores_code.MOST_VECTORS
    score_tile, transpose = scores_code.score_tile, scores_code.transpose
    score_block: Any = machine_code("attention_blocks").score_block
    vectors: Any = machine_code("vectors")
    store, times, fill = vectors.store, vectors.times, vectors.fill
else:
    MOST_VECTORS = 0


def score_together(
    num_queries: int, keys: int, queries: int, room: int, num_vectors: int, scale: float, out: int, out_bytes: int
) -> None:
    for vector in range(num_queries):
        for at in range(0, 64 * num_vectors, 64):
            source = queries + 64 * (num_vectors * 16 * vector) + at
            transpose(source, 64 * num_vectors, room + 16 * (64 * num_vectors * vector + at))
    score_tile(num_queries, keys, room, num_vectors, scale, out, out_bytes, keys)


def score_alone(keys: int, query: int, num_vectors: int, scale: float, out: int) -> None:
    store(out, times(score_block(keys, query, num_vectors), fill(scale)))


@pytest.mark.parametrize("num_channels", [16, 80, 128])
@pytest.mark.parametrize("num_vectors", range(1, MOST_VECTORS + 1))
def test_a_tile_gives_each_query_the_bits_of_its_own_scores(num_vectors: int, num_channels: int) -> None:
    rng, num_queries = np.random.default_rng(num_channels), LANES * num_vectors
    keys, queries = empty((LANES, num_channels)), empty((num_queries, num_channels))
    keys[:], queries[:] = rng.standard_normal(keys.shape), rng.standard_normal(queries.shape)
    room, together, alone = empty(queries.shape), np.zeros((num_queries, 2 * LANES), np.float32), empty((LANES,))
    width, parts = together.strides[0], num_channels // LANES
    vectors.entered(score_together)(
        num_vectors, keys.ctypes.data, queries.ctypes.data, room.ctypes.data, parts, SCALE, together.ctypes.data, width
    )
    one = vectors.entered(score_alone)
    for query, scores in zip(queries, together, strict=True):
        one(keys.ctypes.data, query.ctypes.data, parts, SCALE, alone.ctypes.data)
        assert scores[:LANES].tobytes() == alone.tobytes()
    np.testing.assert_allclose(together[:, :LANES], SCALE * queries @ keys.T, rtol=1e-4, atol=1e-5)
    assert not together[:, LANES:].any()  # the next block of keys has its place there
