"""Tool calling: the functions in the prompt, the grammar of forced calls, and calls read from its text."""
