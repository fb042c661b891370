"""`tutti dashboard`: runs in a browser."""
