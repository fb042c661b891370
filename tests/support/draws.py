"""How many examples a test draws that needs more than a profile's: fewer where time is short."""

from __future__ import annotations

import os


def examples(thorough: int, light: int) -> int:
    """Return one of two numbers, as HYPOTHESIS_PROFILE says."""
    return thorough if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else light
