"""Choices among many candidates by an expensive score, most of which a cheap score leaves out."""
