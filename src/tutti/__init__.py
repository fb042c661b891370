"""tutti: train and serve one large model on a cluster of mixed chips."""
