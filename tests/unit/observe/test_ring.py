"""A rank's ring: what it keeps, also when the rank is killed, and the forms that others read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.observe.ring import Kind, Listed, Ring, read_ring, read_rings, ring_path
from tutti.observe.ring_export import chrome_trace, flight_record, spans

LIST = [
    Listed(words="Forward units 0-1", lane="compute"),
    Listed(words="Send activations at unit 2", lane="network", meets="activations at unit 2"),
]


def ring_of(path: Path, *, events: int = 64) -> Ring:
    return Ring(path, rank=3, world=4, instructions=LIST, events=events)


def test_events_come_back_in_order(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "rank-3.ring")
    ring.begin_step(7)
    ring.note(Kind.START, 0)
    ring.note(Kind.ISSUED, 0)
    read = read_ring(tmp_path / "rank-3.ring")  # while it is open
    assert (read.rank, read.world, read.process) == (3, 4, os.getpid())
    assert read.instructions == tuple(LIST)
    assert [(e.kind, e.step, e.instruction) for e in read.events] == [
        (Kind.STEP, 7, -1), (Kind.START, 7, 0), (Kind.ISSUED, 7, 0),
    ]  # fmt: skip
    assert abs(read.events[-1].time_ns + read.clock_ns - time.time_ns()) < 60e9
    ring.close()


def test_only_the_last_events_are_kept_and_the_size_is_fixed(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "a.ring", events=16)
    size = (tmp_path / "a.ring").stat().st_size
    for step in range(100):
        ring.begin_step(step)
    assert [e.step for e in read_ring(tmp_path / "a.ring").events] == list(range(84, 100))
    assert (tmp_path / "a.ring").stat().st_size == size
    ring.close()


def test_an_event_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    ring = ring_of(path, events=16)
    for _ in range(3):
        ring.note(Kind.STEP)
    ring.close()
    data = bytearray(path.read_bytes())
    at = len(data) - 16 * 40 + 2 * 40  # the second event: its number at its end is of another
    data[at + 32] = 99
    path.write_bytes(data)
    assert [e.number for e in read_ring(path).events] == [1, 3]


def test_it_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tutti.observe.ring import Kind, Listed, Ring\n"
        "ring = Ring(Path(sys.argv[1]), rank=0, world=1, instructions=[])\n"
        "for step in range(50): ring.begin_step(step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [e.step for e in read_ring(path).events] == list(range(50))


def test_bad_rings_are_one_line(tmp_path: Path) -> None:
    path = ring_path(tmp_path, 0)
    ring_of(path).close()
    whole = path.read_bytes()
    for data, words in (
        (b"", "is no ring"),
        (b"x" * 500, "is no ring"),
        (whole[:-10], "cut off"),
        (whole[:8] + b"\x63" + whole[9:], "version 99"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=words):
            read_ring(path)
    assert read_rings(tmp_path)[0] == []
    assert "version 99" in read_rings(tmp_path)[1][0]
    with pytest.raises(InputError, match="no such file"):
        read_ring(tmp_path / "nowhere")


def test_exports(tmp_path: Path) -> None:
    ring = ring_of(tmp_path / "a.ring")
    ring.begin_step(1)
    for kind, index in (
        (Kind.START, 0), (Kind.ISSUED, 0), (Kind.START, 1), (Kind.ISSUED, 1), (Kind.WAIT, 1),
    ):  # fmt: skip
        ring.note(kind, index)
    read = read_ring(tmp_path / "a.ring")
    ring.close()
    assert [(s.instruction, s.waits, s.end_ns is None) for s in spans(read)] == [
        (0, False, False), (1, False, False), (1, True, True),
    ]  # fmt: skip
    events = [e for e in chrome_trace([read])["traceEvents"] if e["ph"] == "X"]
    assert [e["tid"] for e in events] == ["compute", "network", "waits"]
    assert events[-1]["name"].endswith("(not over)")
    (entry,) = flight_record(read)["entries"]
    assert (entry["state"], entry["is_p2p"]) == ("started", True)
    assert entry["profiling_name"] == "tutti:Send"
