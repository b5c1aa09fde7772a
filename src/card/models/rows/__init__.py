"""KV rows of running sequences."""
