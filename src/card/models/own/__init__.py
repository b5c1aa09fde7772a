"""The exact pass: our own machine code over packed weights."""
