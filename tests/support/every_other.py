"""Cases of which `make test` runs half, and `make test-slow` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_other(cases: Iterable[str], first: int = 0) -> list[Any]:
    """Return the cases as parameters; from one (0 or 1) on, those between are slow."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] if number % 2 != first else [])
        for number, case in enumerate(cases)
    ]
