"""A model over several ranks: groups, collectives with gradients, rings, overlap."""
