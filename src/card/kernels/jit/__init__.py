"""Machine code made while the program runs, by numba, for the kinds of processors of `card.machine.processor`."""
