"""`tutti bench cpu`: ranks on this machine's processors, tutti beside torch's own ways."""
