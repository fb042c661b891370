"""A rank's process as its agent has it, and what the kernel and the host's memory say of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.elastic.messages import ChipPulse
from tutti.elastic.system_calls import system_call
from tutti.errors import InputError
from tutti.observe.pulse import PulseReader, Reading


@dataclass(slots=True)
class RankProcess:
    """A process, as its agent has it."""

    chip: str
    process: int
    events: int  # the end to read from
    commands: int  # the end to write to
    log: Path
    pid: int = 0
    pidfd: int = -1
    unread: bytes = b""
    ended_at: float = 0.0
    status: int | None = None
    words: str = ""  # what it said was wrong
    told_at: float = 0.0  # to leave
    pulse: PulseReader | None = None

    def reading(self, path: Path) -> Reading | None:
        """Return what its pulse says; None before there is one."""
        if self.pulse is None:
            with contextlib.suppress(InputError):
                self.pulse = PulseReader(path)
        return None if self.pulse is None else self.pulse.read()

    def close(self) -> None:
        """Let go of its pipes."""
        for descriptor in (self.events, self.commands, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)


def copy_steps(folder: Path, chip: str) -> tuple[tuple[int, int], ...]:
    """Return generation and step of the whole copies of a chip, by their labels."""
    steps = list[tuple[int, int]]()
    for label in sorted(folder.glob(f"copy-{chip.replace('/', '-')}-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = json.loads(label.read_text(encoding="utf-8"))
            steps.append((int(words["generation"]), int(words["facts"]["progress"]["step"])))
    return tuple(steps)


def chip_pulse(chip: str, reading: Reading, now_ns: int) -> ChipPulse:
    """Return a pulse as others are told of it."""
    return ChipPulse(
        chip=chip,
        generation=reading.generation,
        step=reading.step,
        instruction=reading.instruction,
        activity=int(reading.activity),
        idle_ns=now_ns - reading.beat_ns,
        links_idle_ns=now_ns - reading.link_beat_ns,
        state=process_state(reading.process),
        operations=tuple((op.name, op.peers) for op in reading.operations),
        call=system_call(reading.process),
    )


def still_pulses(readings: Mapping[str, Reading], quiet_s: float) -> tuple[ChipPulse, ...]:
    """Return the pulses of a host's chips if none of them has moved for a while; else none."""
    now = time.monotonic_ns()
    if any(now - reading.beat_ns < quiet_s * 1e9 for reading in readings.values()):
        return ()
    return tuple(chip_pulse(chip, reading, now) for chip, reading in readings.items())


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Tell whether a process is there."""
    return process_state(pid) not in ("", "Z", "X")


def end_processes(ranks: Sequence[RankProcess], within_s: float = 3.0) -> None:
    """Wait for processes that were told to end; end those that do not."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit and any(r.pid and is_alive(r.pid) for r in ranks):
        time.sleep(0.02)
    for rank in ranks:
        if rank.pid and is_alive(rank.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        rank.close()


def how_ended(status: int | None) -> str:
    """Return how a process ended, in words."""
    if status is None:
        return "is gone"
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
