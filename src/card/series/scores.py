"""Scores of a forecast against what came."""

from __future__ import annotations

import numpy as np

from card.series.data import Values


def crps(samples: Values, truth: Values) -> float:
    """Return the continuous ranked probability score, mean over the steps, in the units of the series; less is better.

    It is mean |x - y| - mean |x - x'| / 2 over pairs of different samples, so more samples do not change its mean.

    Args:
        samples: [S, T], S of 2 or more.
        truth: [T].
    Source: Gneiting and Raftery 2007, Strictly Proper Scoring Rules, Prediction, and Estimation.
    """
    num_samples = len(samples)
    ranks = 2 * np.arange(1, num_samples + 1) - num_samples - 1
    apart = (ranks[:, None] * np.sort(samples, 0)).sum(0) / (num_samples * (num_samples - 1) / 2)
    return float((np.abs(samples - truth).mean(0) - apart / 2).mean())


def squared_error(samples: Values, truth: Values) -> float:
    """Return the mean squared error of the samples' mean, in squared units of the series: [S, T] and [T]."""
    return float(np.square(samples.mean(0) - truth).mean())
