"""Messages between target and drafter."""
