"""Methods that are only settings of the engine, and methods that are one local writer of the core."""
