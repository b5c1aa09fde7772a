"""CARD inside somebody else's engine: what an engine that verifies chains needs, and no engine's import."""

from card.inside.adapters.proposer import ChainProposer
from card.inside.adapters.settings import AdapterSettings
from card.inside.adapters.setup import make_proposer

__all__ = ["AdapterSettings", "ChainProposer", "make_proposer"]
