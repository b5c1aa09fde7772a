"""Check that a server of OpenAI's API writes the same with and without speculation. See its README.md."""
