"""A step time that no plan of the space beats."""
