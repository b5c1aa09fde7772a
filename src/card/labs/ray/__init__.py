"""Targets and a pool of drafters on Ray Serve."""
