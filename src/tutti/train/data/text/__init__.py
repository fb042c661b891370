"""Text that comes with tutti, so that the first run needs no download. All of it is our own."""
