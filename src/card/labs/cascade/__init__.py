"""Choices among many candidates by a dear score, most of which a cheap score leaves out."""

from card.labs.cascade.search import CascadeChoice, cascade_argmin, spearman

__all__ = ["CascadeChoice", "cascade_argmin", "spearman"]
