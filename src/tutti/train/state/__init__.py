"""A rank's share of parameters, gradients and optimizer state, on the device or on the host."""
