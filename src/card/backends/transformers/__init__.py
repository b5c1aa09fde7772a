"""Models that run through transformers' own modules."""
