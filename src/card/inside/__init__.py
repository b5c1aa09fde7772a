"""CARD inside the engines of others."""
