"""Passes recorded as CUDA graphs."""
