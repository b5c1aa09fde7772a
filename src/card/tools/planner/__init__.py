"""Runs of every method on hardware and pairs that were only profiled and recorded: the engine in virtual time."""
