"""Kernels of keys and values in pages."""
