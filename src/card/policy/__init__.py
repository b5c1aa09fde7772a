"""How a round is decided: what it costs, what is accepted, which schedule runs, what is drafted and verified."""
