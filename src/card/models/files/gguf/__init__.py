"""Weights and tokenizers out of GGUF files."""
