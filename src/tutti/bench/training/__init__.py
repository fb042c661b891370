"""Whole training steps on one chip, beside peers."""
