"""Parts of an answer: what a model thinks, what it says, and the calls that it makes, read from its text."""
