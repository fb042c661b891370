"""The planner: strategy search under exact bounds. Today its exact inner solvers."""
