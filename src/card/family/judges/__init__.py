"""Judges: they decide which candidates are accepted although the target would have chosen another token."""
