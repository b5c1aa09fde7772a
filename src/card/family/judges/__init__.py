"""Judges: they decide which candidates may stay although the target would have chosen another token."""
