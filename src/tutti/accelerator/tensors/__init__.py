"""How tensors lie in memory, and the tables that kernels read of it."""
