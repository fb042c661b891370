"""Operators on weights of 8 and 4 bits and on adapters, as the host computes them."""
