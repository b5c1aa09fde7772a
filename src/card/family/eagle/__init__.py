"""The training of EAGLE-3 heads, which every method with a draft model can use."""
