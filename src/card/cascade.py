"""Choices by a cheap score and a dear one: the public door of `card.labs.cascade`."""

from card.labs.cascade.search import CascadeChoice, cascade_argmin, spearman

__all__ = ["CascadeChoice", "cascade_argmin", "spearman"]
