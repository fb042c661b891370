"""Whether the host or the chip holds a block up: both are timed for one step.

Issuing a block's kernels takes the host as long as it takes, whatever their size; the chip's time
grows with the tokens. Where issuing takes about as long as running, the chip waits for the host,
and a graph, issued as one, is worth having.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tutti.accelerator.accelerator import Accelerator, Event

LAUNCH_SHARE = 0.72
"""Of the chip's time of a block: from here on the host's issuing is what it waits for.

Measured on an H200 (`benchmarks/engine_graphs.py`, whole steps of the 1B shape): up to 2,048 tokens
graphs gain 2.3 to 3×, and the host needs 0.79 to 0.91 of the time that the chip seems to need while
it waits; at 4,096 tokens they gain 1 to 3 % and it needs 0.66 to 0.76; from 8,192 nothing, and 0.3.
"""


class BlockTimes(NamedTuple):
    """Seconds of one block's passes."""

    host_s: float  # to issue them
    chip_s: float  # to run them, gaps included

    @property
    def graphs_pay(self) -> bool:
        """Whether the chip waits for the host."""
        return self.host_s >= LAUNCH_SHARE * self.chip_s


class LaunchClock:
    """Times the passes of blocks, by kind."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._host: dict[str, list[float]] = {}
        self._chip: dict[str, list[tuple[Event, Event]]] = {}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Time a pass of one block."""
        pair = (self._accelerator.event(timed=True), self._accelerator.event(timed=True))
        pair[0].record()
        begin = time.perf_counter()
        yield
        self._host.setdefault(kind, []).append(time.perf_counter() - begin)
        pair[1].record()
        self._chip.setdefault(kind, []).append(pair)

    def times(self) -> BlockTimes | None:
        """Return the times of one block; None if no pass was seen.

        The host's shortest time counts: a full queue makes it wait, which is not issuing.
        """
        if not self._host:
            return None
        for pairs in self._chip.values():
            pairs[-1][1].synchronize()
        chip = [
            statistics.median(last.seconds_since(first) for first, last in pairs)
            for pairs in self._chip.values()
        ]
        return BlockTimes(sum(min(seconds) for seconds in self._host.values()), sum(chip))
