"""What it costs to measure and to watch a run."""
