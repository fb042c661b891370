"""Cases of which `make test` runs half, and `make test-slow` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_other(cases: Iterable[str]) -> list[Any]:
    """Return the cases as parameters; the second, the fourth and so on are slow."""
    return [
        pytest.param(case, marks=[pytest.mark.slow] if number % 2 else [])
        for number, case in enumerate(cases)
    ]
