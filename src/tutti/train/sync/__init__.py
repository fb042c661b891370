"""What ranks do together: gradients out, parameters in, tied weights, groups."""
