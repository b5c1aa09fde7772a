"""Products of a pass in 8-bit integers, and jit/: the machine code of a whole pass."""
