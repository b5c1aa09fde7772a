"""Machine code made while the program runs, by numba, for processors that multiply bytes (AVX-512 VNNI)."""
