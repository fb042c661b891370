"""What is asked: the space of strategies, changed clusters, the effort allowed."""
