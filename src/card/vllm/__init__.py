"""CARD as a proposer of vLLM: method `custom_class`, model `card.vllm.CardProposer`."""

from card.vllm.proposer import CardProposer

__all__ = ["CardProposer"]
