"""Tool calling: what the model is told of functions, the grammar of forced calls, and calls read from its text."""
