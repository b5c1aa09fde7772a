"""A beam that stays on its CUDA device."""
