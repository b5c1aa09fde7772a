"""Step-wise routing: the draft model writes a step, and a router decides whether the target rewrites it."""
