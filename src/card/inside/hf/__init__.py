"""CARD inside transformers' `generate`."""
