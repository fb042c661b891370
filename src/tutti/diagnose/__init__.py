"""Evidence in, findings out: which chip is slow, which rank hangs, and why."""
