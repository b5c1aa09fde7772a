"""Methods that consist of engine settings, or of one local writer of the core."""
