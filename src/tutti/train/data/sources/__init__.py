"""Readers of files: each finds the pieces of a file, and the records in a piece."""
