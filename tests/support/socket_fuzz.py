"""Clients that are none: garbage, halves, resets, endless headers, bodies that never end."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

BODY = b'{"prompt": "once upon a time", "max_tokens": 60, "ignore_eos": true, "stream": true}'
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
Attack = Callable[[random.Random, socket.socket], None]


def garbage(r: random.Random, to: socket.socket) -> None:
    """Send bytes without a meaning."""
    to.sendall(r.randbytes(r.randrange(1, 5000)))


def other_protocols(r: random.Random, to: socket.socket) -> None:
    """Speak TLS, HTTP/2, a WebSocket's handshake, HTTP/0.9."""
    to.sendall(
        r.choice(
            (
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + r.randbytes(200),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + r.randbytes(40),
                b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket"
                b"\r\nsec-websocket-key: eHh4eHh4eHh4eHh4eHh4eA==\r\nsec-websocket-version: 13\r\n"
                b"\r\n",
                b"GET /\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"GET \xff\x00 HTTP/1.1\r\n\r\n",
                b"GET * HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n" * 2000,
            )
        )
    )  # fmt: skip


def flipped(r: random.Random, to: socket.socket) -> None:
    """Send a request with some bytes changed."""
    data = bytearray(HEAD % len(BODY) + BODY)
    for _ in range(r.randint(1, 6)):
        data[r.randrange(len(data))] = r.randrange(256)
    to.sendall(data)


def half(r: random.Random, to: socket.socket) -> None:
    """Send the beginning of a request."""
    data = HEAD % len(BODY) + BODY
    to.sendall(data[: r.randrange(1, len(data))])


def endless_headers(r: random.Random, to: socket.socket) -> None:
    """Send headers that do not end, in one line or in many."""
    line = b"x" * 100_000 if r.random() < 0.5 else b"a: b\r\n" * 16_000
    to.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + line)


def wrong_lengths(r: random.Random, to: socket.socket) -> None:
    """Say lengths that are none, or two of them, or chunks that are none."""
    said = r.choice(
        (
            b"content-length: -1", b"content-length: 99999999999999999999", b"content-length: x",
            b"content-length: 5\r\ncontent-length: 9", b"transfer-encoding: chunked",
            b"content-length: 5\r\ntransfer-encoding: chunked", b"transfer-encoding: gzip",
        )
    )  # fmt: skip
    body = r.choice(
        (b"zz\r\nx", b"ffffffffffffffff\r\nx", b"5\r\nhello\r\n0\r\n\r\n", r.randbytes(40))
    )
    to.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + said + b"\r\n\r\n" + body)


def pipelined(r: random.Random, to: socket.socket) -> None:
    """Send many requests at once."""
    to.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * r.randint(2, 300))


def leaves_a_stream(r: random.Random, to: socket.socket) -> None:
    """Ask for a stream, read a little of it."""
    to.sendall(HEAD % len(BODY) + BODY)
    if r.random() < 0.7:
        to.settimeout(2)
        to.recv(r.randint(1, 600))


ATTACKS: tuple[Attack, ...] = (
    garbage, other_protocols, flipped, half, endless_headers, wrong_lengths, pipelined,
    leaves_a_stream,
)  # fmt: skip


def attack(r: random.Random, host: str, port: int, tally: Counter[str]) -> None:
    """Do one of them, then close, reset, or wait for what is said."""
    chosen = r.choice(ATTACKS)
    with socket.create_connection((host, port), timeout=10) as to:
        try:
            chosen(r, to)
            end = r.random()
            if end < 0.3:
                to.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif end < 0.5:
                to.shutdown(socket.SHUT_WR)
            elif end < 0.7:
                to.settimeout(0.05)
                answer = to.recv(100)
                tally[answer[9:12].decode("latin-1")] += 1
        except OSError as error:
            tally[type(error).__name__] += 1
    tally[chosen.__name__] += 1


def hold(host: str, port: int, count: int) -> list[socket.socket]:
    """Open connections that say a little and then nothing."""
    held = []
    for number in range(count):
        to = socket.create_connection((host, port), timeout=10)
        to.sendall((b"", b"GET /version HT", HEAD % 5000 + b'{"prompt')[number % 3])
        held.append(to)
    return held


def num_files(pid: int) -> int:
    """Return how many files and sockets a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def files_after(pid: int, most: int, seconds: float) -> int:
    """Wait until a process has no more than so many files open; return how many it has."""
    until = time.monotonic() + seconds
    while (found := num_files(pid)) > most and time.monotonic() < until:
        time.sleep(0.1)
    return found


def resident(pid: int) -> int:
    """Return a process's memory in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
