"""Every threshold of the search has a unit and a reason, and is read somewhere."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import tutti.search
from tutti.search.thresholds import THRESHOLDS, Thresholds

ROOM = Path(tutti.search.__file__).parent
SOURCE = "\n".join(path.read_text() for path in sorted(ROOM.rglob("*.py")))


@pytest.mark.parametrize("field", fields(Thresholds), ids=lambda field: field.name)
def test_it_has_a_unit_and_a_reason_and_is_read(field) -> None:
    assert field.metadata["unit"]
    assert len(field.metadata["reason"].split()) >= 3
    assert f"THRESHOLDS.{field.name}" in SOURCE


def test_no_search_changes_one() -> None:
    with pytest.raises(FrozenInstanceError):
        THRESHOLDS.curious = 3  # type: ignore[misc]
