"""The decoding methods, one folder each."""
