"""A run that is told over the wire: who hangs, and what answers as no run does."""

from __future__ import annotations

import io
import json
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tutti.diagnose.finding import Component
from tutti.diagnose.runs.wire import address_of, diagnose_address
from tutti.errors import InputError
from tutti.observe.evidence import NOW, PATH, packed_evidence, unpack_evidence
from tutti.observe.folder import METRICS, RINGS
from tutti.observe.prometheus import Prometheus
from tutti.observe.ring import Kind, Listed, Ring, read_ring, ring_path, shortened_ring

FORWARD = Listed(words="Forward units 0-1", lane="compute")
CLIP = Listed(words="ClipNorm", lane="network", meets="ClipNorm")
HOUR_NS = 3600 * 1_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run in which rank 1 waits for rank 0, which computes for ever."""
    for rank in range(2):
        ring = Ring(
            ring_path(tmp_path / RINGS, rank), rank=rank, world=2, instructions=[FORWARD, CLIP]
        )
        ring.begin_step(7)
        ring.note(Kind.START, 0)
        if rank:
            ring.note(Kind.ISSUED, 0)
            ring.note(Kind.START, 1)
            ring.note(Kind.WAIT, 1)
        ring.close()
    lines = [{"step": n, "seconds": 1.0, "pools": {}} for n in range(7)]
    (tmp_path / METRICS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_run_by_its_port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="needs tutti-ml[observe]")
    import time

    now = time.time_ns()
    monkeypatch.setattr("tutti.observe.prometheus.time.time_ns", lambda: now + HOUR_NS)
    port = free_port()
    sink = Prometheus(port, folder=folder)
    try:
        found = diagnose_address("127.0.0.1", port)
    finally:
        sink.close()
    assert found.where.ranks == (0,)
    assert "Forward units 0-1" in found.cause
    assert any("2 rings; the run is alive" in note for note in found.notes)
    assert all(str(folder) not in one.file for one in found.evidence)


def answering(body: bytes, status: int = 200, now: str = "1") -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == PATH
            self.send_response(status)
            self.send_header(NOW, now)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def archive(name: str, data: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "now", "said"),
    [
        (b"<html>", 200, "1", "no evidence of a run"),
        (b"<html>", 404, "1", r"tells no run \(404\)"),
        (b"", 200, "x", "tells no run"),
        (archive("../../etc/passwd"), 200, "1", "no evidence of a run"),
        (archive("rings/rank-00000.ring", b"x"), 200, "1", "neither rings nor figures"),
        (archive(METRICS, b"not json\n"), 200, "1", "neither rings nor figures"),
    ],
)
def test_what_is_no_run(body: bytes, status: int, now: str, said: str) -> None:
    ports = answering(body, status, now)
    with pytest.raises(InputError, match=said):
        diagnose_address("127.0.0.1", next(ports))
    list(ports)


def test_nobody_there() -> None:
    with pytest.raises(InputError, match=r"does not answer .*refused.*; give the run's folder"):
        diagnose_address("127.0.0.1", free_port())


def test_one_who_listens_and_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = diagnose_address("127.0.0.1", silent.getsockname()[1], timeout_s=0.2)
    assert (found.component, found.where.ranks) == (Component.UNDETERMINED, (0,))
    assert found.exit_code == 2


def test_addresses() -> None:
    assert address_of("gpu-7.example:9100") == ("gpu-7.example", 9100)
    assert address_of("[::1]:9100") == ("::1", 9100)
    assert address_of("runs/one") is None
    with pytest.raises(InputError, match="ports are 1 to 65535"):
        address_of("host:70000")


def test_a_shortened_ring_keeps_the_newest(folder: Path, tmp_path: Path) -> None:
    path = ring_path(tmp_path / "long", 3)
    ring = Ring(path, rank=3, world=4, instructions=[FORWARD], events=64)
    for step in range(50):
        ring.begin_step(step)
    ring.close()
    short = tmp_path / "short.ring"
    short.write_bytes(shortened_ring(path, 8))
    whole, kept = read_ring(path), read_ring(short)
    assert kept.events == whole.events[-8:]
    assert (kept.rank, kept.world, kept.instructions) == (3, 4, whole.instructions)
    assert short.stat().st_size < path.stat().st_size


def test_evidence_leaves_out_what_is_damaged(folder: Path, tmp_path: Path) -> None:
    (folder / RINGS / "rank-00009.ring").write_bytes(b"tuttirng")
    target = tmp_path / "there"
    unpack_evidence(packed_evidence(folder), target)
    assert sorted(p.name for p in (target / RINGS).iterdir()) == [
        "rank-00000.ring", "rank-00001.ring",
    ]  # fmt: skip
    assert (target / METRICS).read_bytes() == (folder / METRICS).read_bytes()
