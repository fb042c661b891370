"""`tutti fabric`: the network designed and simulated."""
