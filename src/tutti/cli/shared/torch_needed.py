"""One line where a verb needs torch and there is none."""

from __future__ import annotations

import importlib.util

from tutti.errors import InputError


def require_torch(verb: str) -> None:
    """Refuse to go on without torch."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"{verb} needs torch; install it: pip install 'tutti-ml[torch]'")
