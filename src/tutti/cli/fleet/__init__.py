"""`tutti fleet`: several jobs on one cluster."""
