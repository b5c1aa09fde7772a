"""Choices by a cheap score and an expensive one: the public door of `card.labs.cascade`."""

from card.labs.cascade.search import CascadeChoice, cascade_argmin, spearman

__all__ = ["CascadeChoice", "cascade_argmin", "spearman"]
