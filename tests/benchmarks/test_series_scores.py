"""Scores of forecasts are those of their definitions."""

from __future__ import annotations

import numpy as np
import pytest


def test_scores_are_those_of_their_definitions(bench):
    rng = np.random.default_rng(0)
    samples, truth = rng.normal(size=(6, 5)), rng.normal(size=5)
    apart = [np.abs(samples[i] - samples[j]) for i in range(6) for j in range(6) if i != j]
    expected = np.abs(samples - truth).mean() - np.mean(apart) / 2
    assert bench["series"].crps(samples, truth) == pytest.approx(expected)
    assert bench["series"].squared_error(samples, truth) == pytest.approx(((samples.mean(0) - truth) ** 2).mean())
