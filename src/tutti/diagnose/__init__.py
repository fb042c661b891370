"""Evidence in, findings out: what went wrong, which chip is slow, which rank hangs, and why."""
