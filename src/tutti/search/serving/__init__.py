"""The planner of deployments: which engines, in which roles, on which chips, with which shares."""
