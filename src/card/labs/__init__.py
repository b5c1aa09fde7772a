"""Experiments beside text, and systems around several engines."""
