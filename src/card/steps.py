"""Answers written step by step by two models: the public door of `card.labs.steps`."""

from card.labs.steps import *  # noqa: F403
