"""Measure whether a draft model makes a target faster, and if not, why."""
