"""Probe packets and their sockets: what is sent, when it came, and which switch sent it back.

Linux keeps what routers say of a datagram (ICMP) on its socket's error queue, with the first bytes
of the datagram, so that no right to raw sockets is needed. The kernel notes when a datagram came;
a receiver that is late reads the true time all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from tutti.errors import InputError

_PACKET = struct.Struct("!4sBBHIIQ")  # mark, kind, number, source, nonce, sequence, time sent
_MARK = b"TuPr"
_ERROR = struct.Struct("=IBBBxII")  # errno, origin, type, code, info, data
_TIME = struct.Struct("=qq")
PACKET_BYTES = _PACKET.size
TRAIN_BYTES = 1400  # of payload, in every packet of a train
TRAIN_PACKETS = 24
# numbers that Python's socket module does not name
_IP_RECVERR, _IP_TTL, _IP_RECVTTL = 11, 2, 12
HOPS = 64  # that a packet may take, unless it is told fewer
_SO_TIMESTAMPNS, _SO_RXQ_OVFL = 35, 40
_SOL_UDP, _UDP_SEGMENT = 17, 103
_FROM_ICMP = 2
TIME_EXCEEDED, UNREACHABLE = 11, 3
_REFUSED = {
    errno.EAGAIN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ENOBUFS,
    errno.EPERM, errno.ENETDOWN, errno.EPROTO, errno.EMSGSIZE, errno.EHOSTDOWN, errno.EACCES,
}  # fmt: skip


class ProbeKind(IntEnum):
    """What a packet is for."""

    PROBE = 1
    TRAIN = 2
    TRACE = 3  # its time to live ends on the way
    KNOCK = 4  # to a port that nobody has: the kernel there answers
    ECHO = 5  # to be answered at once
    ANSWER = 6  # to an echo: its number, and when it was sent, later by what the answer took


class Probe(NamedTuple):
    """What a packet says; `number` is its place in a train, or how many hops it may take."""

    kind: int  # one of ProbeKind; another is of a later version
    number: int
    source: int
    sequence: int
    sent_ns: int


class Arrival(NamedTuple):
    """A packet that came."""

    probe: Probe
    address: str
    port: int
    at_ns: int
    hops: int  # that it took
    overflowed: int  # datagrams that this socket had no room for, since it was made


class Complaint(NamedTuple):
    """What a router or host says of a packet of ours."""

    probe: Probe
    target: str
    by: str
    icmp: int


def pack(kind: ProbeKind, number: int, source: int, sequence: int) -> bytes:
    """Return a packet, stamped with the time; no two carry the same bytes."""
    nonce = random.getrandbits(32)
    return _PACKET.pack(_MARK, kind, number, source, nonce, sequence, time.time_ns())


def answer(echo: Probe, held_ns: int) -> bytes:
    """Return the answer to an echo that lay here for so long: it says when it was sent, without."""
    nonce = random.getrandbits(32)
    sent_ns = echo.sent_ns + max(0, held_ns)
    return _PACKET.pack(
        _MARK, ProbeKind.ANSWER, echo.number, echo.source, nonce, echo.sequence, sent_ns
    )


def unpack(data: bytes) -> Probe | None:
    """Read a packet; None: it is not one of ours."""
    if len(data) < PACKET_BYTES or data[:4] != _MARK:
        return None
    _, kind, number, source, _, sequence, sent_ns = _PACKET.unpack_from(data)
    return Probe(kind, number, source, sequence, sent_ns)


def train(source: int, sequence: int) -> bytes:
    """Return the payloads of a train, one after another."""
    return b"".join(
        pack(ProbeKind.TRAIN, number, source, sequence).ljust(TRAIN_BYTES, b"\0")
        for number in range(TRAIN_PACKETS)
    )


class Receiving:
    """The socket that probes are sent to."""

    def __init__(self, address: str, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        for option, value in (
            (socket.SO_RCVBUF, 1 << 20),
            (_SO_TIMESTAMPNS, 1),
            (_SO_RXQ_OVFL, 1),
        ):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_RECVTTL, 1)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise InputError(f"{address}:{port}: {os.strerror(error.errno or 0)}") from None

    def fileno(self) -> int:
        """Return its descriptor, to wait for packets."""
        return self._socket.fileno()

    def send(self, data: bytes, to: tuple[str, int]) -> bool:
        """Send a packet from the port that others send to; say whether it left."""
        for _ in range(2):  # an earlier packet's error is told once, in the place of this one
            try:
                self._socket.sendto(data, to)
                return True
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
        return False

    def arrivals(self) -> Iterator[Arrival]:
        """Yield what has come since the last call."""
        while True:
            try:
                data, notes, _, sender = self._socket.recvmsg(2048, 128)
            except OSError as error:
                if error.errno in _REFUSED:
                    return
                raise
            probe = unpack(data)
            if probe is None:
                continue
            at_ns, overflowed, left = time.time_ns(), 0, HOPS
            for level, kind, value in notes:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                    seconds, rest = _TIME.unpack(value[: _TIME.size])
                    at_ns = seconds * 1_000_000_000 + rest
                elif level == socket.SOL_SOCKET and kind == _SO_RXQ_OVFL:
                    overflowed = int.from_bytes(value[:4], sys.byteorder)
                elif (level, kind) == (socket.IPPROTO_IP, _IP_TTL):
                    left = int.from_bytes(value[:4], sys.byteorder)
            yield Arrival(probe, sender[0], sender[1], at_ns, HOPS - left, overflowed)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


class Sending:
    """A socket with a source port of its own: connections hashed by it take one path."""

    def __init__(self, address: str, port: int) -> None:
        self.port = port
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        self._socket.setsockopt(socket.IPPROTO_IP, _IP_TTL, HOPS)
        self._segments = True
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise InputError(f"{address}:{port}: {os.strerror(error.errno or 0)}") from None

    def send(self, data: bytes, to: tuple[str, int], hops: int | None = None) -> bool:
        """Send a packet, for so many hops; say whether it left."""
        notes = [] if hops is None else [(socket.IPPROTO_IP, _IP_TTL, struct.pack("=i", hops))]
        for _ in range(2):  # an earlier packet's error is told once, in the place of this one
            try:
                self._socket.sendmsg([data], notes, 0, to)
                return True
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
        return False

    def send_train(self, data: bytes, to: tuple[str, int]) -> bool:
        """Send a train at once: the kernel cuts it, so that no pause of ours is in it."""
        if self._segments:
            cut = [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", TRAIN_BYTES))]
            try:
                self._socket.sendmsg([data], cut, 0, to)
                return True
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOPROTOOPT, errno.EIO, errno.EOPNOTSUPP):
                    self._segments = False
                elif error.errno not in _REFUSED:
                    raise
        sent = True
        for first in range(0, len(data), TRAIN_BYTES):
            sent &= self.send(data[first : first + TRAIN_BYTES], to)
        return sent

    def complaints(self) -> Iterator[Complaint]:
        """Yield what was said of our packets since the last call."""
        while True:
            try:
                data, notes, _, target = self._socket.recvmsg(256, 256, socket.MSG_ERRQUEUE)
            except OSError as error:
                if error.errno in _REFUSED:
                    break
                raise
            probe = unpack(data)
            for level, kind, value in notes:
                if probe is None or (level, kind) != (socket.IPPROTO_IP, _IP_RECVERR):
                    continue
                _, origin, icmp, _, _, _ = _ERROR.unpack_from(value)
                if origin == _FROM_ICMP and len(value) >= _ERROR.size + 8:
                    by = socket.inet_ntoa(value[_ERROR.size + 4 : _ERROR.size + 8])
                    yield Complaint(probe, target[0], by, icmp)
        with contextlib.suppress(OSError):  # nobody sends here; what comes is thrown away
            while True:
                self._socket.recv(64)

    def close(self) -> None:
        """Close it."""
        self._socket.close()
