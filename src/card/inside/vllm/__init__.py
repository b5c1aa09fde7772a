"""CARD as a proposer of vLLM: method `custom_class`, model `card.vllm.CardProposer`."""

from card.inside.vllm.proposer import CardProposer

__all__ = ["CardProposer"]
