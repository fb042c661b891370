"""The variables by which a launcher makes a process a rank. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from tutti.errors import InputError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_as_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether a launcher made this process a rank.

    A process with a rank but no place to meet is refused: it would run the whole job by itself, as
    would all the others.
    """
    missing = [name for name in VARIABLES if name not in environment]
    if missing and "RANK" in environment:
        raise InputError(
            f"RANK is set, but not {', '.join(missing)}; start ranks by torchrun or `tutti "
            "launch`, or unset RANK to run them all on this machine"
        )
    return not missing
