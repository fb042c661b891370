"""A training job as people start it: its file, its ranks, its loop."""
