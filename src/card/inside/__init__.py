"""CARD inside other engines."""
