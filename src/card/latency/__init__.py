"""Pass times on this machine: measured, kept for later starts, and measured again when it is quiet."""
