"""Model types whose heavier comparisons run with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# made of parts that others have
COMBINED = (
    "arcee", "cohere2", "dots1", "exaone4", "internlm3", "nemotron", "olmo3", "olmoe", "phimoe",
    "seed_oss", "smollm3",
)  # fmt: skip


def with_slow(names: Iterable[str], *, first: bool = False) -> list[Any]:
    """Return names as parameters, those of combined types slow; `first`: but not their first."""
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if name.split("/")[0] in COMBINED and not (first and name in COMBINED)
        else name
        for name in names
    ]
