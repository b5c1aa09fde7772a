"""The two sides of decoding as state machines: a target that verifies and drafters that propose."""
