"""What programs import: `LLM`, `AsyncLLM` and what they return."""
