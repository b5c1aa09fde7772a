"""PARD, which adapts a small language model into a drafter that guesses K tokens in one pass."""
