"""`tutti evaluate`."""
