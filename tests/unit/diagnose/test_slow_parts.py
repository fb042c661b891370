"""Slow chips and wires of a run, by name."""

from __future__ import annotations

import random

from tutti.diagnose.slow_parts import SlowParts, Wire

NAMES = ["a/0", "a/0", "a/1", "a/2"]  # of the ranks' wires


def wires(slow: float = 1.0) -> list[Wire]:
    """Return what ranks carried: to the third, from every other host, as slowly as that."""
    return [(0, 2, 1e6, 0.2 * slow), (2, 3, 1e6, 0.2), (3, 0, 1e6, 0.2), (1, 0, 1e6, 9.0),
            (3, 2, 1e6, 0.2 * slow)]  # fmt: skip


def test_a_chip_and_a_wire_are_slow_and_well_again() -> None:
    parts = SlowParts([1.0] * 4, [f"chip-{i}" for i in range(4)], NAMES)
    noise = random.Random(0)
    said: list[str] = []
    for number in range(1, 120):
        chip, wire = 20 < number <= 60, 70 < number <= 90
        took = [(1.5 if chip and rank == 3 else 1.0) * noise.gauss(1, 0.01) for rank in range(4)]
        said += parts.step(number, 2.0, took, wires(2.0 if wire else 1.0))
        if number == 40:
            assert 1.4 < parts.chips["chip-3"] < 1.6
            assert list(parts.chips) == ["chip-3"]
            assert parts.wires == {}
        if number == 85:
            assert parts.chips == {}
            assert set(parts.wires) == {("a/0", "a/1"), ("a/1", "a/2")}
    assert parts.chips == parts.wires == {}
    assert "rank 3 (chip-3) computes 1.5" in said[0]
    assert len(said) == 6
