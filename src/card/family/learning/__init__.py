"""Parts that all trainings share."""
