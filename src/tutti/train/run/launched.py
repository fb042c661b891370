"""The variables by which a launcher makes a process a rank. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_as_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether a launcher made this process a rank."""
    return all(name in environment for name in VARIABLES)
