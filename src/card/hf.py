"""`custom_generate=card.hf.generate`: the public door of `card.inside.hf`."""

from card.inside.hf import *  # noqa: F403
