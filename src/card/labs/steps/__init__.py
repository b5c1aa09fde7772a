"""Step-wise routing: the draft model writes a step, and a router says whether the target writes it anew."""
