"""Deciding a round: what it costs, what is accepted, which schedule runs, what is drafted and verified."""
