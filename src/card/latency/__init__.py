"""How long passes take here: measured, kept for later starts, and measured again when it is quiet."""
