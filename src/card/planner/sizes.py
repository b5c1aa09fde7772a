"""Which passes `card profile` measures unless told otherwise."""

DEFAULT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # new ones of a sequence
DEFAULT_CONTEXTS = (32, 256, 768)  # rows that a sequence holds before
DEFAULT_BATCHES = (1, 4)  # sequences
