"""`tutti plan`: options, search, results."""
