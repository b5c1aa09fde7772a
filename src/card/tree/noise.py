"""Gumbel noise: how a token is drawn by the same function that chooses the largest score."""

from __future__ import annotations

import math
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from card.kernels import gumbel

_BYTES_KEPT = 1 << 24  # noise that a request remembers: 1,024 positions of 4,096 tokens, 27 of 152,000
# By how much two sums may change places when the noise itself takes the place of noise within 1e-5 of it, and by how
# much of their size, which floats of 24 bits round: five times what either can do.
_NEAR, _ROUNDED = 1e-4, 1e-6


class GumbelNoise:
    """Standard Gumbel noise for each (position, token) of one seed, from the counter-based generator Philox.

    The noise depends on nothing but (seed, position, token id): Philox 4x64 keyed by the seed, with the position in
    the upper half of its counter. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    Machine code draws noise that is near it, and the noise itself is looked at where that decides.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._rows: dict[int, NDArray[np.float32]] = {}
        self._lock = Lock()  # the drafter may be another thread

    def row(self, position: int) -> NDArray[np.float32]:
        """Return the noise of one position: [V]."""
        return _noise_of(np.random.Philox(key=self._seed, counter=[0, 0, position, 0]).random_raw(self._vocab_size))

    def near(self, position: int, tokens: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Return the noise of one position within 1e-5: [V], or of some tokens, which are in ascending order."""
        if tokens is not None and gumbel.draws_noise():
            return gumbel.noise_of(self._seed, position, tokens)
        row = self._rows.get(position)
        if row is None:
            row = gumbel.noise(self._seed, position, self._vocab_size) if gumbel.draws_noise() else self.row(position)
            with self._lock:
                if len(self._rows) >= max(1, _BYTES_KEPT // row.nbytes):
                    self._rows.pop(next(iter(self._rows)))
                self._rows[position] = row
        return row if tokens is None else row[tokens]

    def likeliest(
        self, scores: NDArray[np.floating[Any]], position: int, tokens: NDArray[np.int64] | None = None
    ) -> tuple[int, float]:
        """Return where the largest sum of score and noise is, the first of equal ones, and nearly that sum.

        Args:
            scores: [V], or those of ``tokens``. If a sum is no finite number, the largest may be none either.
            tokens: in ascending order; None: all.
        """
        sums = scores + self.near(position, tokens)
        best = int(sums.argmax())  # a NaN counts as largest
        reached = float(sums[best])
        if not math.isfinite(reached):
            return best, reached
        close = np.flatnonzero(sums >= reached - _NEAR - _ROUNDED * abs(reached))
        if len(close) == 1:
            return best, reached
        exact = scores[close] + self.row(position)[close if tokens is None else tokens[close]]
        winner = int(exact.argmax())
        return int(close[winner]), float(exact[winner])


_shared: WeakValueDictionary[tuple[int, int], GumbelNoise] = WeakValueDictionary()


def shared_noise(seed: int, vocab_size: int) -> GumbelNoise:
    """Return the noise of a seed, which others in this process may hold: a drafter has drawn what the target needs."""
    return _shared.setdefault((seed, vocab_size), GumbelNoise(seed, vocab_size))


def _noise_of(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return standard Gumbel noise from random bits; each value depends on its own bits alone, and grows with them."""
    noise = (bits >> np.uint64(12)).astype(np.float64)  # worked on in place: new memory takes as long as logarithms
    noise += 0.5
    noise *= 2.0**-52  # uniform inside (0, 1), exactly
    for _ in range(2):
        np.negative(np.log(noise, out=noise), out=noise)
    return noise.astype(np.float32)
