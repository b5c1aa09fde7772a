"""What a tree of candidates is, and when one of its tokens is right: no torch model, no I/O."""
