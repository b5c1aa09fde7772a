"""Drafters whose rows stand for a token and a state: a block in a checkpoint, or an EAGLE-3 head."""
