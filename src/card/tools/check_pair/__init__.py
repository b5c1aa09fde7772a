"""Whether a draft model is worth its while for a target, and why not."""
