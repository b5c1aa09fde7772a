"""Ollama's API, over the path of conversations and completions: its bodies, its answers, its lists of models."""
