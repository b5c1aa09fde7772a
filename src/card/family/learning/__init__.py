"""The parts that all trainings share."""
