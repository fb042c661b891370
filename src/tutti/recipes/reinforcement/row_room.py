"""How many answers a row has room for. Needs no torch."""

from __future__ import annotations


def answers_per_row(length: int, prompt: int, answer: int) -> int:
    """Return how many answers surely fit a row, by the longest prompt and the longest answer."""
    return length // (prompt + answer)
