"""A new plan for a running one: what survives, what moves, when it pays."""
