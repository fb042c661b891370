"""The last mile: a local search over every field of a Plan, each step simulated."""
