"""Predict the speed of every method: the engine in virtual time, from profiles of hardware and recordings of pairs."""
