"""What `tutti bench` measures: the work behind its verbs."""
