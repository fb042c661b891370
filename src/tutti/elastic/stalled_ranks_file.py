"""What an agent writes of ranks that do not move, for whoever looks at the run's folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from tutti.elastic.messages import ChipPulse, Order
from tutti.errors import TuttiError
from tutti.observe.folder import RINGS
from tutti.observe.stalled_ranks import Still, still_path, write_still

AGAIN_S = 1.0  # between two writings


class StillFile:
    """The file of one host."""

    def __init__(self, run: Path, host: str) -> None:
        self._path = still_path(run / RINGS, host)
        self._next, self._there = 0.0, self._path.exists()

    def take(self, pulses: Sequence[ChipPulse], order: Order | None) -> None:
        """Take the pulses of all ranks that do not move; none: something does."""
        if not pulses or order is None:
            if self._there:
                self._path.unlink(missing_ok=True)
                self._there, self._next = False, 0.0
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + AGAIN_S
        ranks = {seat.chip: seat.rank for seat in order.seats}
        still = [_still(ranks[p.chip], p) for p in pulses if p.chip in ranks]
        with contextlib.suppress(OSError, TuttiError):  # a full disk is no reason to end
            write_still(self._path, len(order.seats), still)
            self._there = True


def _still(rank: int, pulse: ChipPulse) -> Still:
    return Still(
        rank=rank,
        chip=pulse.chip,
        generation=pulse.generation,
        step=pulse.step,
        instruction=pulse.instruction,
        activity=pulse.activity,
        idle_s=pulse.idle_ns / 1e9,
        links_idle_s=pulse.links_idle_ns / 1e9,
        state=pulse.state,
        call=pulse.call,
        operations=pulse.operations,
    )
