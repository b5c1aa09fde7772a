"""Trees of candidates, and the rule by which one of their tokens is right: no torch model, no I/O."""
