"""The planner: from a question to the best plan, with a proof of how good it is."""
