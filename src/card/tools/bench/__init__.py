"""Measure methods, pairs, data sets and settings against each other in one run. See its README.md."""
