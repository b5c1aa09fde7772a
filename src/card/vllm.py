"""CARD as a proposer of vLLM: method `custom_class`, model `card.vllm.CardProposer` (`card.inside.vllm`)."""

from typing import TYPE_CHECKING

from card.machine.doors import door

if TYPE_CHECKING:
    from card.inside.vllm.proposer import CardProposer

__all__ = ["CardProposer"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, __all__, ["card.inside.vllm.proposer"], needs=["torch", "vllm"], extra="vllm")
