"""CARD as a proposer of vLLM: method `custom_class`, model `card.vllm.CardProposer` (`card.inside.vllm`)."""

from card.inside.vllm.proposer import CardProposer

__all__ = ["CardProposer"]
