"""`tutti serve`."""
