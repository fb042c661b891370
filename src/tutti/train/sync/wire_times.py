"""What a rank's wires carried in a step, as numbers that all ranks gather.

Of every rank there are as many numbers: its busiest wires, and zeros where it has fewer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from tutti.comm import Communicator
from tutti.comm.transport.lane import Carried

_MOST = 4  # wires of a rank that are told of
_EACH = 3  # the other rank, bytes, seconds
NUM_WIRE_TIMES = _MOST * _EACH


class WireTimes:
    """The difference of what wires have carried since it was last asked."""

    def __init__(self, control: Communicator) -> None:
        self._control = control
        self._before = control.carried()

    def take(self) -> list[float]:
        """Return what was carried since the last time."""
        now = self._control.carried()
        before, self._before = self._before, now
        told = list[tuple[float, float, float]]()
        for peer, own in now.items():
            known = before.get(peer, Carried(0, 0.0))
            if own.bytes > known.bytes and own.busy_s >= known.busy_s:  # less: it was opened anew
                told.append(
                    (float(own.bytes - known.bytes), own.busy_s - known.busy_s, float(peer))
                )
        heaviest = heapq.nlargest(_MOST, told)
        numbers = [n for size, busy_s, peer in heaviest for n in (float(peer), size, busy_s)]
        return numbers + [0.0] * (NUM_WIRE_TIMES - len(numbers))


def wires_of(rank: int, numbers: Sequence[float]) -> Iterator[tuple[int, int, float, float]]:
    """Yield what a rank's numbers say: from, to, bytes, busy seconds."""
    for at in range(0, NUM_WIRE_TIMES, _EACH):
        peer, size, busy_s = numbers[at : at + _EACH]
        if size:
            yield rank, int(peer), size, busy_s
