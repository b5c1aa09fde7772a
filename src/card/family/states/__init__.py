"""Drafters whose rows stand for a token and a state: the block in a checkpoint that drafts."""
