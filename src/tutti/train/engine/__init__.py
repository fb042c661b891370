"""One rank's engine: passes, boundaries, recomputation, totals of a step."""
