"""What target and drafter say to each other."""
