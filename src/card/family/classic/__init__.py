"""Methods that are settings of the engine, and those of a local writer of the core alone."""
