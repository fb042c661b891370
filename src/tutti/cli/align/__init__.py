"""`tutti align`: two sides, tensor by tensor."""
