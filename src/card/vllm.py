"""`card.vllm.CardProposer`: the public door of `card.inside.vllm`."""

from card.inside.vllm import *  # noqa: F403
