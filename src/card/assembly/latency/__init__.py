"""Pass times on this machine: measured in quiet moments, kept for later starts, and checked there."""
