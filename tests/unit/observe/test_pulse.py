"""A rank's pulse: what is written is read by another process, also when the writer is stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.observe.pulse import MOST_OPERATIONS, Activity, OpenOperation, Pulse, PulseReader


def test_what_is_written_is_read(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "rank-3", rank=3, generation=2)
    reader = PulseReader(tmp_path / "rank-3")
    found = reader.read()
    assert (found.rank, found.generation, found.step, found.instruction) == (3, 2, 0, -1)
    assert found.process == os.getpid()
    assert found.activity is Activity.STARTING
    pulse.step(7)
    pulse.at(12, Activity.WAITING)
    pulse.links([("all_reduce #4", (1, 2), 99)])
    found = reader.read()
    assert (found.step, found.instruction, found.activity) == (7, 12, Activity.WAITING)
    assert (found.beats, found.link_beats) == (2, 1)
    assert found.operations == (OpenOperation("all_reduce #4", (1, 2), 99),)
    assert 0 <= time.monotonic_ns() - found.beat_ns < 60e9
    pulse.enter(3)
    assert reader.read().generation == 3
    pulse.links([])
    assert reader.read().operations == ()


def test_more_operations_than_there_is_room_for(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "p", rank=0)
    pulse.links((f"exchange with a long name that is cut #{i}", range(20), i) for i in range(40))
    found = PulseReader(tmp_path / "p").read().operations
    assert len(found) == MOST_OPERATIONS
    assert found[0].peers == tuple(range(7))
    assert found[3].progress_ns == 3


def test_no_pulse_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no pulse of a rank"):
        PulseReader(tmp_path / "missing")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(InputError, match="no pulse of a rank"):
        PulseReader(tmp_path / "short")
    (tmp_path / "other").write_bytes(b"x" * 8192)
    with pytest.raises(InputError, match="another version"):
        PulseReader(tmp_path / "other")


def test_it_is_read_while_its_process_is_stopped_and_when_it_is_gone(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        pulse = Pulse(tmp_path / "p", rank=1)
        pulse.step(5)
        pulse.at(2)
        os.write(told, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGSTOP)
    reader = PulseReader(tmp_path / "p")
    assert (reader.read().step, reader.read().process) == (5, child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert reader.read().instruction == 2
    os.close(ready)
    os.close(told)
