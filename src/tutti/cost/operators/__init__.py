"""Seconds of operators, products and whole units on one chip."""
