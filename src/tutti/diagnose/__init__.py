"""What went wrong, from what was written down: evidence in, findings out."""
