"""The Python API: `LLM`, `AsyncLLM` and the objects they return."""
