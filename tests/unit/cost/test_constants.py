"""The registry of constants: complete, sane, written down in the documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tutti.cost.calibration.stacks import stacks
from tutti.cost.constants import Constants, registry

COST = Path(__file__).parents[3] / "docs" / "concepts" / "cost.md"


def test_the_registry_and_the_fields_are_the_same() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Constants)}
    assert list(fields) == list(registry())
    assert fields == {name: spec.prior for name, spec in registry().items()}


@pytest.mark.parametrize("name", registry())
def test_a_constant_is_documented(name: str) -> None:
    spec = registry()[name]
    assert spec.low < spec.high
    assert spec.meaning
    assert spec.source.split(":")[0] in ("physics", "kernels", "runs")
    (row,) = (line for line in COST.read_text().splitlines() if line.startswith(f"| `{name}` "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        f"`{name}`",
        spec.unit,
        f"{spec.prior:g}",
        f"{spec.sigma:g}",
        spec.meaning,
        spec.source,
    ]


def test_every_stack_has_its_own_groups() -> None:
    groups = [group for stack in stacks().values() for group in stack.groups]
    assert len(groups) == len(set(groups))
    for stack in stacks().values():
        assert not set(stack.compute) & set(stack.cluster)
