"""Models that run as the modules of others, on devices of theirs."""
