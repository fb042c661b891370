"""A deployment, simulated: arrivals, a router, the engine's own scheduler, priced steps."""
