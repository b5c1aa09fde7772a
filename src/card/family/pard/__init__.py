"""PARD: adapt a small language model into a drafter of K tokens per pass."""
