"""CARD as a proposer of vLLM: method `custom_class`, model `card.vllm.CardProposer`."""
