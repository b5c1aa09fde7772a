"""Files that models are read from."""
