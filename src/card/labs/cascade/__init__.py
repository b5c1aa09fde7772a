"""Choices among many candidates by a dear score, most of which a cheap score leaves out."""
