"""What tests do to the ranks of an elastic run from outside, when its pulses show a moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.elastic.agent_settings import IN_MEMORY
from tutti.elastic.join import known_job
from tutti.elastic.rank_processes import is_alive
from tutti.errors import InputError
from tutti.observe.pulse import Activity, PulseReader, Reading
from tutti.train.elastic.host_copies import labelled

TRAINING = (Activity.STEP, Activity.WAITING, Activity.BETWEEN)


def readings(run: Path) -> list[Reading]:
    """Return the pulses of the processes of a run that live."""
    found = list[Reading]()
    name = known_job(run)
    for pulse in Path("/dev/shm").glob(f"{IN_MEMORY}{name}-*/pulse-*") if name else ():
        with contextlib.suppress(InputError, OSError):
            reading = PulseReader(pulse).read()
            if is_alive(reading.process):
                found.append(reading)
    return found


def memory_of(run: Path) -> Path | None:
    """Return the folder in memory that a run's copies are in."""
    name = known_job(run)
    return next(Path("/dev/shm").glob(f"{IN_MEMORY}{name}-*"), None) if name else None


@dataclass
class Struck:
    """A thread that kills a rank at each of some moments."""

    run: Path
    moments: Sequence[str]  # "moving", "saving", "copied": the methods below

    def __post_init__(self) -> None:
        self.killed: list[int] = []
        self._seen = 0  # the newest copy at which a rank was killed
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        for name in self.moments:
            moment: Callable[[], int | None] = getattr(self, name)
            while not self.over.is_set():
                process = moment()
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                        self.killed.append(process)
                    break
                time.sleep(0.0005)

    def end(self) -> int:
        """Stop; return how many were killed."""
        self.over.set()
        self.thread.join(10)
        return len(self.killed)

    def moving(self) -> int | None:
        """A process that is on its way into a generation after the first."""
        for found in readings(self.run):
            if found.activity is Activity.MOVING and found.generation > 1:
                return found.process
        return None

    def saving(self) -> int | None:
        """A process that trains, while a checkpoint is being written."""
        if not any((self.run / "checkpoints").glob("*.partial/*")):
            return None
        return next((f.process for f in readings(self.run) if f.activity in TRAINING), None)

    def copied(self) -> int | None:
        """A process that trains, right after the label of a copy was written."""
        memory = memory_of(self.run)
        steps = [] if memory is None else [step for _, _, step, _ in labelled(memory)]
        newest = max(steps, default=0)
        if newest <= self._seen:
            return None
        self._seen = newest + 1
        return next((f.process for f in readings(self.run) if f.activity in TRAINING), None)
