"""Plans for the edge: devices with drafters, servers with targets, and radio between them."""
