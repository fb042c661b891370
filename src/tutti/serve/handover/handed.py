"""Where the keys and values of a prompt go. Needs no torch: API processes say it."""

from __future__ import annotations

import msgspec


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """The engine that decodes what this one begins, and the name of what it is sent."""

    key: str
    engine: int
    generation: int = 0
