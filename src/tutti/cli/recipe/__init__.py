"""`tutti recipe`."""
