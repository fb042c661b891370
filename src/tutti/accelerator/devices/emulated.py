"""A chip of another speed and memory than the host has (DESIGN.md §5).

It computes on the host, truly, and then waits: `dilated` until the block took `factor` times its
processor time, `declared` until it took the seconds that the caller names. When the host was slower
than the emulated chip should be, that is an overrun; above 5 % a run does not count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.errors import InputError, hint
from tutti.hardware.chip import LARGEST_OVERRUN

SPIN_S = 2e-4  # the last part of a wait is spun, for a sleep ends late
MODES = ("declared", "dilated")


@dataclass(slots=True)
class Overrun:
    """How long the emulated chip should have worked, and how much longer the host took."""

    due_s: float = 0.0
    late_s: float = 0.0

    @property
    def share(self) -> float:
        """The lateness as a part of the time due."""
        return self.late_s / self.due_s if self.due_s else 0.0

    @property
    def counts(self) -> bool:
        """Whether the host kept up well enough for the figures to count."""
        return self.share <= LARGEST_OVERRUN


def wait_until(moment: float) -> float:
    """Wait for a moment of `time.perf_counter`; return by how much it had passed already."""
    left = moment - time.perf_counter()
    if left <= 0:
        return -left
    if left > SPIN_S:
        time.sleep(left - SPIN_S)
    while time.perf_counter() < moment:
        pass
    return 0.0


class EmulatedAccelerator(CpuAccelerator):
    """A chip whose time is declared or dilated, and whose memory is limited."""

    name = "emulated"

    def __init__(
        self,
        *,
        chip: str,
        mode: Literal["declared", "dilated"] = "declared",
        factor: float = 1.0,
        memory_bytes: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise InputError(f"emulated chip '{chip}': 'mode' is '{mode}'; {hint(mode, MODES)}")
        if mode == "dilated" and not 1.0 <= factor < math.inf:
            raise InputError(
                f"emulated chip '{chip}': 'factor' is {factor}; the host cannot be outrun, give 1 "
                "or more"
            )
        if memory_bytes is not None and memory_bytes < 1:
            raise InputError(
                f"emulated chip '{chip}': 'memory_bytes' is {memory_bytes}; give 1 or more"
            )
        super().__init__(chip=chip)
        self.mode, self.factor = mode, factor
        self.overrun = Overrun()
        if memory_bytes is not None:
            self.limit_memory(memory_bytes)

    @contextlib.contextmanager
    def paced(self, declared_s: float | None = None) -> Iterator[None]:
        """Let what is inside take its emulated time, and count what was late."""
        if self.mode == "declared" and (declared_s is None or not 0 <= declared_s < math.inf):
            raise InputError(
                f"emulated chip '{self.chip}' runs on declared time; {declared_s} is none, give "
                "seconds"
            )
        start, busy = time.perf_counter(), time.thread_time()
        yield
        due = declared_s or 0.0
        if self.mode == "dilated":
            due = self.factor * (time.thread_time() - busy)
        self.overrun.due_s += due
        self.overrun.late_s += wait_until(start + due)
