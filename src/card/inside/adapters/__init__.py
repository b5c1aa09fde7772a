"""Shared parts of CARD as a drafter for other engines that verify chains; they import no engine."""

from card.inside.adapters.proposer import ChainProposer
from card.inside.adapters.settings import AdapterSettings
from card.inside.adapters.setup import make_proposer

__all__ = ["AdapterSettings", "ChainProposer", "make_proposer"]
