"""Strangers at a listening socket: closed, named, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tutti.comm.entry import listener as module
from tutti.comm.entry.listener import Door, Strangers
from tutti.comm.entry.trust import REPLY_BYTES, Called, Caller, Key
from tutti.comm.reactor import Reactor
from tutti.comm.transport.tcp import listen
from tutti.launch.secret import Secret

KEY = Key(Secret(b"s" * 32), "mesh")
WAIT_S = 60.0  # of a machine with much else to do


class Guarded:
    """A door of rank 0 of 2, who came in, and what was said of the others."""

    def __init__(self) -> None:
        self.admitted: list[tuple[socket.socket, int]] = []
        self.said: list[str] = []
        self.failures: list[BaseException] = []
        self.reactor = Reactor("door")
        self.reactor.on_failure = self.failures.append
        listener = listen("127.0.0.1")
        self.port: int = listener.getsockname()[1]
        self.door = Door(
            self.reactor,
            listener,
            lambda: Called(KEY, 0, 2),
            lambda sock, peer: self.admitted.append((sock, peer)),
            Strangers("port 7", self.said.append),
        )
        self.reactor.call(self.door.open)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def enter(self) -> None:
        """Come in as rank 1 does."""
        before = len(self.admitted)
        sock, caller = self.connect(), Caller(KEY, 1, 0)
        sock.sendall(caller.hello)
        sock.sendall(caller.answer(receive(sock, REPLY_BYTES)))
        until(lambda: len(self.admitted) > before)
        sock.close()

    def close(self) -> None:
        self.reactor.call(self.door.close)
        self.reactor.stop()
        for sock, _ in self.admitted:
            sock.close()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    found = Guarded()
    yield found
    found.close()
    assert not found.failures


def receive(sock: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length and (part := sock.recv(length - len(found))):
        found += part
    return found


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.01)


def is_closed(sock: socket.socket) -> bool:
    """Wait until the other side has closed."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    sock.close()
    return True


class Command:
    """A pickle that leaves a file behind where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def test_strangers_bytes(guarded: Guarded, tmp_path: Path) -> None:
    payloads = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        struct.pack("<Q", 2**63) * 20,
        struct.pack("<I", 2**32 - 1) + b"{",
        pickle.dumps(Command(tmp_path / "ran")),
        b"tutti/3\n" + struct.pack("<II", 2**31, 2**31) + bytes(32),
    ]
    for payload in payloads:
        sock = guarded.connect()
        with contextlib.suppress(ConnectionError):
            sock.sendall(payload)
        assert is_closed(sock)
        guarded.enter()  # others are let in all the while
    assert not (tmp_path / "ran").exists()
    assert [peer for _, peer in guarded.admitted] == [1] * len(payloads)
    assert len(guarded.said) == 1  # each address once
    assert guarded.said[0].startswith("a stranger at 127.0.0.1:")
    assert guarded.said[0].endswith(
        "was turned away from port 7: no greeting of a rank; it sent "
        "b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'; the run goes on"
    )


def test_a_wrong_secret_and_a_replay(guarded: Guarded) -> None:
    sock, caller = guarded.connect(), Caller(KEY, 1, 0)
    sock.sendall(caller.hello)
    proof = caller.answer(receive(sock, REPLY_BYTES))
    sock.sendall(proof)
    until(lambda: len(guarded.admitted) == 1)
    sock.close()
    replay = guarded.connect()
    replay.sendall(caller.hello + proof)
    assert is_closed(replay)
    until(lambda: len(guarded.said) == 1)
    assert "wrong proof for rank 1: it knows another secret" in guarded.said[0]
    other = Key(Secret(b"t" * 32), "mesh")
    wrong, caller = guarded.connect(), Caller(other, 1, 0)
    wrong.sendall(caller.hello)
    nonce = receive(wrong, REPLY_BYTES)[:32]
    wrong.sendall(other.proof(b"caller", caller.hello, nonce))
    assert is_closed(wrong)
    assert len(guarded.admitted) == 1
    guarded.enter()


def test_those_who_say_nothing(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.5)
    silent, slow = guarded.connect(), guarded.connect()
    slow.sendall(b"tutt")
    guarded.enter()
    assert is_closed(silent)
    assert is_closed(slow)
    assert "no proof within 0.5 s" in guarded.said[0]
    assert len(guarded.admitted) == 1


def test_silent_ones_are_few_at_a_time(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 8)
    many = [guarded.connect() for _ in range(30)]
    guarded.enter()
    assert all(is_closed(sock) for sock in many[:20])
    assert len(guarded.door._guests) <= 8
    assert "8 connections without a proof at once" in guarded.said[0]
    for sock in many[20:]:
        sock.close()


def test_without_descriptors_it_waits(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who come while the process can open nothing are let in when it can."""
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    refusals = iter([OSError(24, "Too many open files")] * 3)

    class Full:
        """A listener that fails three times."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener

        def __getattr__(self, name: str) -> object:
            return getattr(self._listener, name)

        def fileno(self) -> int:
            return self._listener.fileno()

        def accept(self) -> object:
            for error in refusals:
                raise error
            return self._listener.accept()

    full = Full(guarded.door._listener)

    def swap() -> None:
        guarded.reactor.watch(guarded.door._listener, None, None)
        guarded.door._listener = full  # type: ignore[assignment]
        guarded.door.open()

    guarded.reactor.call(swap)
    guarded.enter()


def test_a_local_socket_names_the_process() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        host, address = module._name(ours, "")
    assert (host, address) == (
        f"user {os.getuid()}", f"process {os.getpid()} of user {os.getuid()} on this host",
    )  # fmt: skip


def test_strangers_are_not_named_for_ever() -> None:
    said: list[str] = []
    strangers = Strangers("here", said.append)
    for number in range(40):
        for _ in range(2):
            strangers.note(f"10.0.0.{number}", f"10.0.0.{number}:9", "why", b"")
    assert len(said) == 10
    strangers._said_at = [time.monotonic() - 61.0]
    strangers.note("10.0.1.0", "10.0.1.0:9", "why", b"x")
    assert said[-1].endswith("why; it sent b'x'; the run goes on; 30 others are not named")
