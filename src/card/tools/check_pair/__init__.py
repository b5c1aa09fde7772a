"""A measurement that says whether a draft model is worth its while for a target, and why not."""
