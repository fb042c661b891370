"""The judge of the planner: drawn questions, single changes, other forms of one question."""
