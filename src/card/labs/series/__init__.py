"""Speculation for time series: a small forecaster proposes patches of values, a large one accepts or replaces them."""
