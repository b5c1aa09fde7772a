"""Choices by a cheap score and a dear one: the public door of `card.labs.cascade`."""

from card.labs.cascade import *  # noqa: F403
