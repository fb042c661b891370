"""A rehearsal: emulated chips of two kinds on this machine, one of them slower than its twins.

What measures them is what measures real chips; only their time is declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tutti.accelerator.devices.emulated import EmulatedAccelerator
from tutti.diagnose.active.chips import read_chip
from tutti.diagnose.cluster.chips import ChipReading

PASS_S = {"fast": 0.03, "old": 0.075}  # 2.5 apart
EACH = 4  # of each kind
SICK = 2  # which of the fast ones is slow
REPEATS = 5


class TimedChip(EmulatedAccelerator):
    """A chip whose every pass takes the same declared time."""

    def __init__(self, chip: str, seconds: float) -> None:
        super().__init__(chip=chip, mode="declared")
        self._seconds = seconds

    @contextmanager
    def paced(self, declared_s: float | None = None) -> Iterator[None]:
        """Let what is inside take the chip's time."""
        with super().paced(self._seconds if declared_s is None else declared_s):
            yield


def rehearsed(slow: float = 1.5, *, repeats: int = REPEATS) -> list[ChipReading]:
    """Return the readings of eight emulated chips; one is `slow` times as slow as it should be."""
    readings = []
    for number, kind in enumerate(kind for kind in PASS_S for _ in range(EACH)):
        chip = TimedChip(kind, PASS_S[kind] * (slow if number == SICK else 1.0))
        # all of them are this machine's processor: once is enough
        read = read_chip(chip, repeats=repeats, checks_products=number == 0)
        readings.append(replace(read, name=f"host{number}/{kind} chip"))
    return readings
