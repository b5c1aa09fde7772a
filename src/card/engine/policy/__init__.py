"""Decisions of a round: its cost, the acceptance of candidates, the schedule, what is drafted and verified."""
