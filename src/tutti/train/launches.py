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

LAUNCH_SHARE = 0.8
"""Of the chip's time of a block: from here on the host's issuing is what it waits for.

Measured on an H200 (`benchmarks/block_graph.py`, 1B shape): a graph gains 4.2× at 1,024 tokens and
1.19× at 4,096, where both take equally long; it loses 1 to 3 % from 8,192, where the host needs
about 0.6 of the chip's time.
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
