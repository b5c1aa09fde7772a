"""Anthropic's API: messages, in the shape that Claude Code and Anthropic's clients send and read."""
