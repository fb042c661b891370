"""Training files that work as they are, with a small model and data to try them on."""
