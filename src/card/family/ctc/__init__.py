"""Drafting heads over the target's hidden states: T slots, trained by CTC or by cross-entropy."""
