"""Machine code made while the program runs, by LLVM, for the kinds of processors of `card.machine.processor`."""
